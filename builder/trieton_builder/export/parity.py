"""The exported graphs against the PyTorch model and against themselves, with beams reordered at every level.

Differences are of log-probabilities. They are absolute where the logits around them are small, as they are in a trained
model, and relative beyond `LARGE`: of numbers of 1e30, float32 holds seven digits.
"""

import numpy as np
import torch
from torch import Tensor, nn
from trieton.retriever.session import Retriever, RetrieverSpec

# Beam widths of the levels in turn, so that a level may have more or fewer beams than the one before.
BEAMS = (1, 4, 7, 3)
NARROW = (1,)
LARGE = 100.0  # logits up to here are compared by absolute differences


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
    prompts = [rng.integers(0, spec.vocab_size, n) for n in _lengths(spec.max_length)]
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
        logits, log_z = arrays(session(level, codes, parents))
        for b, prompt in enumerate(prompts):
            wanted, scale = reference(model, spec, level, prompt, suffixes[b])
            difference = np.abs(logits[b] - log_z[b][:, None] - wanted) / scale
            worst = float(np.maximum(worst, difference.max()))
    return worst


def difference_by_company(retriever: Retriever, *, seed: int = 0) -> float:
    """The largest difference between a prompt alone and the same prompt in a batch with longer and shorter ones.

    Graphs whose attention forgets which places are padding, at any level, show it here.
    """
    rng = np.random.default_rng(seed)
    spec = retriever.spec
    prompts = [rng.integers(0, spec.vocab_size, n) for n in _lengths(spec.max_length)]
    together, alone = retriever.start(prompts), [retriever.start([prompt]) for prompt in prompts]
    codes = parents = None
    worst, beams = 0.0, 1
    for level in range(spec.num_levels):
        if level:
            width = BEAMS[level % len(BEAMS)]
            parents = rng.integers(0, beams, (len(prompts), width))
            codes = rng.integers(0, spec.token_map.sizes[level - 1], (len(prompts), width))
            beams = width
        logits, log_z = arrays(together(level, codes, parents))
        for b, session in enumerate(alone):
            own = None if codes is None else codes[b : b + 1], None if parents is None else parents[b : b + 1]
            own_logits, own_log_z = arrays(session(level, *own))
            scale = np.maximum(np.abs(own_logits[0]).max(-1, keepdims=True) / LARGE, 1)
            difference = (logits[b] - log_z[b][:, None]) - (own_logits[0] - own_log_z[0][:, None])
            worst = float(np.maximum(worst, (np.abs(difference) / scale).max()))
    return worst


def reference(
    model: nn.Module, spec: RetrieverSpec, level: int, prompt: np.ndarray, suffixes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [M, W] of the model for each column of a level, and [M, 1] what differences are divided by."""
    columns = torch.from_numpy(spec.token_map.columns[level])
    logits = reference_logits(model, torch.from_numpy(prompt), torch.from_numpy(suffixes)).float()
    scale = (logits.abs().amax(-1, keepdim=True) / LARGE).clamp(min=1)
    if spec.normalise == "level":
        return logits[:, columns].log_softmax(-1).numpy(), scale.numpy()
    return logits.log_softmax(-1)[:, columns].numpy(), scale.numpy()


def arrays(pair: tuple) -> tuple[np.ndarray, np.ndarray]:
    logits, log_z = (torch.as_tensor(array).float().cpu().numpy() for array in pair)
    return logits, log_z


def _lengths(most: int) -> list[int]:
    """From one token to the most that a prompt may have."""
    return sorted({1, min(2, most), max(1, most // 3), max(1, most - 1), most})


@torch.no_grad()
def reference_logits(model: nn.Module, prompt: Tensor, suffixes: Tensor) -> Tensor:
    """Logits [M, V] of the model after `prompt` int64 [S] and each of `suffixes` int64 [M, t], without any cache."""
    tokens = prompt.expand(len(suffixes), -1)
    written: dict[str, Tensor] = {}
    if model.config.is_encoder_decoder:
        start = torch.full((len(suffixes), 1), model.config.decoder_start_token_id)
        written["decoder_input_ids"] = torch.cat([start, suffixes], dim=1)
    else:
        tokens = torch.cat([tokens, suffixes], dim=1)
    # The mask hides nothing; without one, transformers remarks on prompts that hold the padding token.
    output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **written)
    return output.logits[:, -1]
