"""Hugging Face's own beam search, held to a catalogue by `prefix_allowed_tokens_fn`: what Trieton must return."""

import numpy as np
import torch
from trieton.retriever.session import TokenMap
from trieton_builder.export.parity import reference_logits


def beam_search(
    model: torch.nn.Module, prompt: np.ndarray, codes: np.ndarray, token_map: TokenMap, width: int
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The best semantic IDs of `codes` [N, L] behind `prompt` int64 [S], with their summed log-probabilities."""
    levels = codes.shape[1]
    tokens = np.stack([token_map.tokens(level, codes[:, level]) for level in range(levels)], axis=1)
    id_of = {tuple(row): tuple(code) for row, code in zip(tokens.tolist(), codes.tolist(), strict=True)}
    children: dict[tuple[int, ...], set[int]] = {}
    for row in id_of:
        for level in range(levels):
            children.setdefault(row[:level], set()).add(row[level])
    written = 1 if model.config.is_encoder_decoder else len(prompt)  # tokens in front of the semantic ID
    output = model.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        length_penalty=0.0,
        max_new_tokens=levels,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        prefix_allowed_tokens_fn=lambda _, sent: sorted(children[tuple(sent[written:].tolist())]),
    )
    found = output[:, written:].numpy()
    scores = np.zeros(len(found), np.float32)
    for level in range(levels):  # scored afresh, without any cache
        logits = reference_logits(model, torch.from_numpy(prompt), torch.from_numpy(found[:, :level]))
        scores += logits.log_softmax(-1).numpy()[np.arange(len(found)), found[:, level]]
    return [id_of[tuple(row)] for row in found.tolist()], scores
