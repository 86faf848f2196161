"""The exported graphs against the PyTorch model, on random prompts with beams reordered at every level."""

import numpy as np
import torch
from torch import Tensor, nn
from trieton.retriever.session import Retriever

# Beam widths of the levels in turn, so that a level may have more or fewer beams than the one before.
BEAMS = (1, 4, 7, 3)
NARROW = (1,)


def largest_difference(model: nn.Module, retriever: Retriever, *, seed: int = 0) -> float:
    """The largest difference of any log-probability between `retriever` and `model` (float32, in evaluation mode).

    Five random prompts, from one token to the maximum length, run as one batch through every level; each beam's row is
    compared with the model run on that beam's own tokens, without any cache. Then one prompt of one token with one
    beam, because exporters like to take a 1 for a fixed size.

    Returns:
        NaN where any log-probability of either side is not a number.
    """
    rng = np.random.default_rng(seed)
    spec = retriever.spec
    lengths = sorted({1, 2, max(1, spec.max_length // 3), max(1, spec.max_length - 1), spec.max_length})
    prompts = [rng.integers(0, spec.vocab_size, n) for n in lengths]
    together = _difference_of_a_batch(model, retriever, prompts, BEAMS, rng)
    alone = _difference_of_a_batch(model, retriever, prompts[:1], NARROW, rng)
    return float(np.maximum(together, alone))  # which keeps a NaN, as Python's max does not


def _difference_of_a_batch(
    model: nn.Module,
    retriever: Retriever,
    prompts: list[np.ndarray],
    beams: tuple[int, ...],
    rng: np.random.Generator,
) -> float:
    spec = retriever.spec
    session = retriever.start(prompts)
    suffixes = np.zeros((len(prompts), 1, 0), np.int64)  # tokens of each beam so far
    codes = parents = None
    worst = 0.0
    for level in range(spec.num_levels):
        if level:
            width = beams[level % len(beams)]
            parents = rng.integers(0, suffixes.shape[1], (len(prompts), width))
            codes = rng.integers(0, spec.token_map.sizes[level - 1], (len(prompts), width))
            tokens = spec.token_map.tokens(level - 1, codes)
            suffixes = np.concatenate([np.take_along_axis(suffixes, parents[..., None], 1), tokens[..., None]], axis=2)
        logits, log_z = (torch.as_tensor(array).cpu().numpy() for array in session(level, codes, parents))
        columns = torch.from_numpy(spec.token_map.columns[level])
        for b, prompt in enumerate(prompts):
            wanted = reference_logits(model, torch.from_numpy(prompt), torch.from_numpy(suffixes[b])).float()
            if spec.normalise == "level":
                wanted = wanted[:, columns].log_softmax(-1)
            else:
                wanted = wanted.log_softmax(-1)[:, columns]
            difference = np.abs(logits[b] - log_z[b][:, None] - wanted.numpy())
            worst = float(np.maximum(worst, difference.max()))
    return worst


@torch.no_grad()
def reference_logits(model: nn.Module, prompt: Tensor, suffixes: Tensor) -> Tensor:
    """Logits [M, V] of the model after `prompt` int64 [S] and each of `suffixes` int64 [M, t], without any cache."""
    prompts = prompt.expand(len(suffixes), -1)
    if model.config.is_encoder_decoder:
        start = torch.full((len(suffixes), 1), model.config.decoder_start_token_id)
        output = model(input_ids=prompts, decoder_input_ids=torch.cat([start, suffixes], dim=1))
    else:
        output = model(input_ids=torch.cat([prompts, suffixes], dim=1))
    return output.logits[:, -1]
