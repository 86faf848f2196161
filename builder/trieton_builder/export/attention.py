"""Attention and head shared by all families. Beams are the query axis over the prompt: its keys and values stand once.

Shapes: batch B, beams M, heads H (key/value heads G <= H in grouped-query attention), prompt length S, suffix length t,
head size D.
"""

import torch
from torch import Tensor, nn

KeyValue = tuple[Tensor, Tensor]


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, M, H * D] -> [B, M, H, D]."""
    return x.unflatten(-1, (-1, head_dim))


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is 1 and a large negative number where it is 0, in its shape.

    Finite, because -inf minus -inf in a softmax is NaN; halved, because a score is added to it.
    """
    return (1 - mask.to(dtype)) * (torch.finfo(dtype).min / 2)


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis in float32, as the Hugging Face classes do, back in the type of `scores`."""
    return torch.softmax(scores.float(), dim=-1).to(scores.dtype)


def reorder(past: Tensor, parents: Tensor) -> Tensor:
    """Suffix keys or values of each beam's parent: [B, P, G, t, D] at [B, M] -> [B, M, G, t, D].

    One gather over the flattened beams; the prompt's keys and values are the same for all beams and are never touched.
    """
    first = torch.arange(past.shape[0], device=past.device)[:, None] * past.shape[1]
    picked = past.flatten(0, 1).index_select(0, (first + parents).flatten())
    return picked.unflatten(0, (parents.shape[0], parents.shape[1]))


def extend(past: Tensor | None, new: Tensor) -> Tensor:
    """Append this step's keys or values [B, M, G, D] to the reordered suffix -> [B, M, G, t + 1, D]."""
    new = new.unsqueeze(3)
    return new if past is None else torch.cat([past, new], dim=3)


def prefix_scores(q: Tensor, prefix_key: Tensor) -> Tensor:
    """Unscaled scores of q [B, M, H, D] over the prompt's keys [B, G, S, D] -> [B, G, (H / G) * M, S].

    The query heads that share a key/value head lie beside the beams, so each prompt key is read once for all of them.
    """
    rows = q.unflatten(2, (prefix_key.shape[1], -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, G, (H / G) * M, D]
    return rows @ prefix_key.transpose(-1, -2)


def prefix_mix(weights: Tensor, prefix_value: Tensor, beams: int) -> Tensor:
    """Weights [B, G, (H / G) * M, S] over the prompt's values [B, G, S, D] -> [B, M, H, D]."""
    mixed = weights @ prefix_value
    return mixed.unflatten(2, (-1, beams)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def suffix_scores(q: Tensor, suffix_key: Tensor) -> Tensor:
    """Unscaled scores of q [B, M, H, D] over each beam's own suffix [B, M, G, t, D] -> [B, M, G, H / G, t]."""
    return q.unflatten(2, (suffix_key.shape[2], -1)) @ suffix_key.transpose(-1, -2)


def suffix_mix(weights: Tensor, suffix_value: Tensor) -> Tensor:
    """Weights [B, M, G, H / G, t] over each beam's own values [B, M, G, t, D] -> [B, M, H, D]."""
    return (weights @ suffix_value).flatten(2, 3)


def joint_attention(q: Tensor, prefix: KeyValue, suffix: KeyValue, prefix_mask: Tensor) -> Tensor:
    """One softmax over prompt and own suffix: q [B, M, H, D], already scaled -> [B, M, H, D].

    Args:
        prefix: keys and values [B, G, S, D], read once for all beams.
        suffix: keys and values [B, M, G, t, D].
        prefix_mask: added to the prompt's scores, broadcast against [B, G, (H / G) * M, S].
    """
    beams, length = q.shape[1], prefix[0].shape[2]
    over_prefix = prefix_scores(q, prefix[0]) + prefix_mask
    # The suffix has a handful of tokens: its scores are brought into the prompt's layout, never the other way round.
    over_suffix = suffix_scores(q, suffix[0]).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, G, (H / G) * M, t]
    weights = softmax(torch.cat([over_prefix, over_suffix], dim=-1))
    own = weights[..., length:].unflatten(2, (-1, beams)).permute(0, 3, 1, 2, 4)  # [B, M, G, H / G, t]
    return prefix_mix(weights[..., :length], prefix[1], beams) + suffix_mix(own, suffix[1])


class Head(nn.Module):
    """Hidden states -> logits of the asked tokens, with the log-normaliser of the distribution they belong to."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, scale: float = 1.0, normalise: str = "vocabulary"):
        super().__init__()
        self.weight, self.bias, self.scale, self.normalise = weight, bias, scale, normalise

    def forward(self, hidden: Tensor, level_tokens: Tensor) -> KeyValue:
        """Hidden [B, M, d], tokens int64 [W] -> logits float32 [B, M, W] and log-normaliser float32 [B, M].

        "vocabulary" runs the whole head but hands out the level's columns only; "level" runs the head over the level's
        tokens alone and normalises over them, which is cheaper and ranks beams of one parent alike, not across parents.
        """
        hidden = hidden * self.scale
        if self.normalise == "level":
            bias = None if self.bias is None else self.bias[level_tokens]
            logits = nn.functional.linear(hidden, self.weight[level_tokens], bias).float()
            return logits, _log_sum_exp(logits)
        logits = nn.functional.linear(hidden, self.weight, self.bias).float()
        return logits.index_select(-1, level_tokens), _log_sum_exp(logits)


def _log_sum_exp(logits: Tensor) -> Tensor:
    top = logits.amax(dim=-1, keepdim=True)
    return (logits - top).exp().sum(dim=-1).log() + top.squeeze(-1)
