"""T5ForConditionalGeneration, relu or gated, scaled head or not: the encoder-decoder shape of TIGER.

The prompt's keys and values are those of the cross-attention; the suffix's are those of the decoder's self-attention,
which begins with the start token. T5 attends without 1/sqrt(D); its relative position biases are folded into tables.
"""

import torch
from torch import Tensor, nn

from trieton_builder.export.attention import (
    Head,
    KeyValue,
    extend,
    mask_bias,
    prefix_mix,
    prefix_scores,
    reorder,
    softmax,
    split_heads,
    suffix_mix,
    suffix_scores,
)
from trieton_builder.export.family import ExportError, Graphs, Limits, needs_layers


def t5_graphs(model: nn.Module, limits: Limits, normalise: str) -> Graphs:
    """The graphs of a T5ForConditionalGeneration, sharing its parameters.

    Raises:
        ExportError: no decoder layers, or a start token that the model lacks.
    """
    config = model.config
    needs_layers(model.encoder.block, "num_layers")
    needs_layers(model.decoder.block, "num_decoder_layers")
    start, known = config.decoder_start_token_id, model.decoder.embed_tokens.num_embeddings
    if type(start) is not int or not 0 <= start < known:
        raise ExportError(f"config: decoder_start_token_id: expected a token 0 <= token < {known}, got {start!r}")
    scaled = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)  # an attribute of its own since 5.x
    head = Head(
        model.lm_head.weight, model.lm_head.bias, scale=config.d_model**-0.5 if scaled else 1.0, normalise=normalise
    )
    step = T5Step(model.decoder, head, limits.table_levels)
    prefill = T5Prefill(model.encoder, step, start, limits.table_length)
    return Graphs(prefill, T5Decode(step), config.num_decoder_layers, config.num_heads, config.d_kv, first_suffix=True)


class T5Prefill(nn.Module):
    """Prompt -> cross-attention keys/values, and the first level's logits with the start token's suffix."""

    def __init__(self, encoder: nn.Module, step: "T5Step", start_token: int, max_length: int):
        super().__init__()
        self.encoder, self.step, self.start_token, self.max_length = encoder, step, start_token, max_length
        distances = torch.arange(-(max_length - 1), max_length)
        self.register_buffer("bias", _bias_table(encoder, distances), persistent=False)  # [H, 2 * max_length - 1]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, level_tokens: Tensor
    ) -> tuple[Tensor, Tensor, list[KeyValue], list[KeyValue]]:
        """int64 [B, S], int64 [B, S], int64 [W] -> logits [B, 1, W], log_z [B, 1], prefix, present."""
        hidden = self.encoder.embed_tokens(input_ids)
        mask = mask_bias(attention_mask[:, None, None, :], hidden.dtype)
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        position = self.bias[:, place[None, :] - place[:, None] + self.max_length - 1]  # [H, S, S]
        for block in self.encoder.block:
            attention = block.layer[0].SelfAttention
            x = block.layer[0].layer_norm(hidden)
            q, k, v = (_heads(attention, name, x).transpose(1, 2) for name in "qkv")  # [B, H, S, D]
            weights = softmax(q @ k.transpose(-1, -2) + position + mask)
            hidden = hidden + attention.o((weights @ v).transpose(1, 2).flatten(2))
            hidden = block.layer[-1](hidden)
        hidden = self.encoder.final_layer_norm(hidden)
        prefix = [
            (_heads(cross, "k", hidden).transpose(1, 2), _heads(cross, "v", hidden).transpose(1, 2))
            for cross in (block.layer[1].EncDecAttention for block in self.step.decoder.block)
        ]
        start = torch.full((input_ids.shape[0], 1), self.start_token, dtype=torch.int64, device=input_ids.device)
        logits, log_z, present = self.step(start, mask, level_tokens, prefix, [None] * len(prefix))
        return logits, log_z, prefix, present


class T5Decode(nn.Module):
    """One token per beam -> the next level's logits and the grown suffix."""

    def __init__(self, step: "T5Step"):
        super().__init__()
        self.step = step

    def forward(
        self,
        input_ids: Tensor,
        parents: Tensor,
        attention_mask: Tensor,
        level_tokens: Tensor,
        prefix: list[KeyValue],
        past: list[KeyValue],
    ) -> tuple[Tensor, Tensor, list[KeyValue]]:
        """int64 [B, M], int64 [B, M], int64 [B, S], int64 [W], [B, H, S, D], [B, P, H, t, D] -> logits [B, M, W], log_z
        [B, M], present [B, M, H, t + 1, D]."""
        mask = mask_bias(attention_mask[:, None, None, :], prefix[0][0].dtype)
        reordered = [(reorder(k, parents), reorder(v, parents)) for k, v in past]
        return self.step(input_ids, mask, level_tokens, prefix, reordered)


class T5Step(nn.Module):
    """The decoder for one token per beam."""

    def __init__(self, decoder: nn.Module, head: Head, max_levels: int):
        super().__init__()
        self.decoder, self.head, self.max_levels = decoder, head, max_levels
        # Of the suffix's tokens to the newest one, oldest first; and one more, because `torch.export` rules out a slice
        # that at its longest would be the whole table.
        distances = -torch.arange(max_levels, -1, -1)
        self.register_buffer("bias", _bias_table(decoder, distances), persistent=False)  # [H, max_levels + 1]

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        level_tokens: Tensor,
        prefix: list[KeyValue],
        past: list[KeyValue] | list[None],
    ) -> tuple[Tensor, Tensor, list[KeyValue]]:
        beams = tokens.shape[1]
        hidden = self.decoder.embed_tokens(tokens)  # [B, M, d]
        present = []
        for block, (prefix_key, prefix_value), before in zip(self.decoder.block, prefix, past, strict=True):
            attention = block.layer[0].SelfAttention
            q, k, v = (_heads(attention, name, block.layer[0].layer_norm(hidden)) for name in "qkv")  # [B, M, H, D]
            past_key, past_value = before if before is not None else (None, None)
            k, v = extend(past_key, k), extend(past_value, v)  # [B, M, H, t, D]
            bias = self.bias[:, self.max_levels + 1 - k.shape[3] :]  # [H, t]
            hidden = hidden + attention.o(suffix_mix(softmax(suffix_scores(q, k) + bias[:, None, :]), v).flatten(2))
            present.append((k, v))

            cross = block.layer[1].EncDecAttention
            q = _heads(cross, "q", block.layer[1].layer_norm(hidden))
            weights = softmax(prefix_scores(q, prefix_key) + mask)
            hidden = hidden + cross.o(prefix_mix(weights, prefix_value, beams).flatten(2))
            hidden = block.layer[2](hidden)
        logits, log_z = self.head(self.decoder.final_layer_norm(hidden), level_tokens)
        return logits, log_z, present


def _heads(attention: nn.Module, name: str, x: Tensor) -> Tensor:
    return split_heads(getattr(attention, name)(x), attention.key_value_proj_dim)


def _bias_table(stack: nn.Module, distances: Tensor) -> Tensor:
    """Relative position bias [H, len(distances)] of key position minus query position; layer 0 holds it for all."""
    attention = stack.block[0].layer[0].SelfAttention
    buckets = attention._relative_position_bucket(
        distances,
        bidirectional=not stack.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return attention.relative_attention_bias(buckets).T.detach().contiguous()
