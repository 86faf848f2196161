"""Hugging Face's own beam search, held to a catalogue by `prefix_allowed_tokens_fn`: what Trieton must return."""

import numpy as np
import torch
from trieton.retriever.session import TokenMap
from trieton_builder.export.parity import reference_logits


def beam_search(
    model: torch.nn.Module,
    prompt: np.ndarray,
    codes: np.ndarray,
    token_map: TokenMap,
    width: int,
    *,
    normalise: str = "vocabulary",
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The best semantic IDs of `codes` [N, L] behind `prompt` int64 [S], with their summed log-probabilities.

    A code of -1 means ended: the end token of the map follows the code before.
    """
    levels, end = codes.shape[1], token_map.end_token
    rows = {tuple(token_map.tokens(i, np.array(c)).item() for i, c in enumerate(row) if c >= 0): row for row in codes}
    ids = {(*row, end) if len(row) < levels else row: tuple(code.tolist()) for row, code in rows.items()}
    children: dict[tuple[int, ...], set[int]] = {}
    for row in ids:
        for level in range(len(row)):
            children.setdefault(row[:level], set()).add(row[level])
    written = 1 if model.config.is_encoder_decoder else len(prompt)  # tokens in front of the semantic ID

    def of_the_level(_: object, __: object, inputs: dict, output: object) -> None:
        level = inputs["decoder_input_ids"].shape[1] - 1
        others = np.setdiff1d(np.arange(output.logits.shape[2]), token_map.columns[level])
        output.logits[:, -1, others] = -torch.inf

    hook = model.register_forward_hook(of_the_level, with_kwargs=True) if normalise == "level" else None
    output = model.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        length_penalty=0.0,
        max_new_tokens=levels,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=0,
        use_cache=hook is None,
        renormalize_logits=normalise == "allowed",
        prefix_allowed_tokens_fn=lambda _, sent: sorted(children.get(tuple(sent[written:].tolist()), {0})),
    )
    if hook is not None:
        hook.remove()
    found: list[tuple[int, ...]] = []
    scores = []
    for row in output[:, written:].tolist():
        length = row.index(end) + 1 if end in row else levels
        tokens = tuple(row[:length])
        if tokens not in ids or ids[tokens] in found:
            continue  # where fewer than `width` exist it fills up, with what is impossible or was there already
        score = np.float32(0)
        for level, token in enumerate(tokens):  # scored afresh, without any cache
            logits = reference_logits(
                model, torch.from_numpy(prompt), torch.tensor([tokens[:level]], dtype=torch.int64)
            )[0]
            over = {
                "vocabulary": np.arange(len(logits)),
                "level": token_map.columns[level],
                "allowed": np.array(sorted(children[tokens[:level]])),
            }[normalise]
            score += np.float32(logits[token] - logits[torch.from_numpy(over)].logsumexp(0))
        found.append(ids[tokens])
        scores.append(score)
    return found, np.array(scores, np.float32)
