"""The decoder-only shape: one self-attention over prompt and suffix, the prompt's part shared by all beams."""

from typing import Any

import torch
from torch import Tensor, nn

from trieton_builder.export.attention import (
    Head,
    KeyValue,
    extend,
    joint_attention,
    mask_bias,
    prefix_mix,
    prefix_scores,
    reorder,
    softmax,
)
from trieton_builder.export.family import Graphs


class Decoder(nn.Module):
    """The parts of a decoder-only model; a family fills them from its Hugging Face class.

    `embed(tokens, positions)`, int64 [B, N] each, gives hidden states [B, N, d]. A layer has `scale` and
    `project(hidden, positions) -> q [B, N, H, D], k [B, N, G, D], v [B, N, G, D]` and
    `finish(hidden, mixed [B, N, H * D]) -> hidden`.
    """

    def __init__(self, embed: nn.Module, layers: list[Any], norm: nn.Module, head: Head):
        super().__init__()
        self.embed, self.layers, self.norm, self.head = embed, nn.ModuleList(layers), norm, head


def decoder_graphs(decoder: Decoder, *, kv_heads: int, head_dim: int) -> Graphs:
    """Prefill and decode of a decoder-only model."""
    return Graphs(
        DecoderPrefill(decoder), DecoderDecode(decoder), len(decoder.layers), kv_heads, head_dim, first_suffix=False
    )


class DecoderPrefill(nn.Module):
    """Prompt -> its keys/values and the logits behind its last token. Padding may stand on either side."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, level_tokens: Tensor
    ) -> tuple[Tensor, Tensor, list[KeyValue]]:
        """int64 [B, S], int64 [B, S], int64 [W] -> logits [B, 1, W], log_z [B, 1], prefix."""
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        last = (attention_mask * place).amax(dim=1, keepdim=True)  # [B, 1]
        hidden = self.decoder.embed(input_ids, positions)
        causal = attention_mask[:, None, :] * (place[:, None] >= place[None, :]).to(torch.int64)
        mask = mask_bias(causal, hidden.dtype)  # [B, S, S]
        prefix = []
        for number, layer in enumerate(self.decoder.layers):
            q, k, v = layer.project(hidden, positions)
            k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, G, S, D]
            prefix.append((k, v))
            if number == len(self.decoder.layers) - 1:
                # Of the last layer only the last token's output is wanted.
                q, hidden, mask = _at(q, last), _at(hidden, last), _at(mask, last)
            queries = hidden.shape[1]
            scores = prefix_scores(q, k).unflatten(2, (-1, queries)) * layer.scale  # [B, G, H / G, N, S]
            weights = softmax(scores + mask[:, None, None])
            hidden = layer.finish(hidden, prefix_mix(weights.flatten(2, 3), v, queries).flatten(2))
        logits, log_z = self.decoder.head(self.decoder.norm(hidden), level_tokens)
        return logits, log_z, prefix


class DecoderDecode(nn.Module):
    """One token per beam -> the next level's logits and the grown suffix."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        input_ids: Tensor,
        parents: Tensor,
        attention_mask: Tensor,
        level_tokens: Tensor,
        prefix: list[KeyValue],
        past: list[KeyValue],
    ) -> tuple[Tensor, Tensor, list[KeyValue]]:
        """int64 [B, M], int64 [B, M], int64 [B, S], int64 [W], [B, G, S, D], [B, P, G, t, D] -> logits [B, M, W], log_z
        [B, M], present [B, M, G, t + 1, D]."""
        behind = attention_mask.sum(1, keepdim=True) + past[0][0].shape[3]  # [B, 1]
        positions = behind.expand(-1, input_ids.shape[1])
        hidden = self.decoder.embed(input_ids, positions)
        mask = mask_bias(attention_mask[:, None, None, :], hidden.dtype)
        present = []
        for layer, (prefix_key, prefix_value), (past_key, past_value) in zip(
            self.decoder.layers, prefix, past, strict=True
        ):
            q, k, v = layer.project(hidden, positions)
            k, v = extend(reorder(past_key, parents), k), extend(reorder(past_value, parents), v)
            present.append((k, v))
            mixed = joint_attention(q * layer.scale, (prefix_key, prefix_value), (k, v), mask)
            hidden = layer.finish(hidden, mixed.flatten(2))
        logits, log_z = self.decoder.head(self.decoder.norm(hidden), level_tokens)
        return logits, log_z, present


def _at(values: Tensor, places: Tensor) -> Tensor:
    """Row `places[b]` of each `values[b]`: [B, N, ...] at [B, 1] -> [B, 1, ...]."""
    return values[torch.arange(values.shape[0], device=values.device)[:, None], places]
