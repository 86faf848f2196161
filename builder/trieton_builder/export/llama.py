"""The Llama shape, rotary positions and grouped-query attention: Llama, Mistral, Qwen2 (biases), Qwen3 (q/k norm)."""

import torch
from torch import Tensor, nn

from trieton_builder.export.attention import Head, split_heads
from trieton_builder.export.decoder import Decoder, decoder_graphs
from trieton_builder.export.family import ExportError, Graphs, Limits, needs_layers

CHANGING = ("dynamic", "longrope")  # rotary frequencies that depend on the length of the sequence


def llama_graphs(model: nn.Module, limits: Limits, normalise: str) -> Graphs:
    """The graphs of a causal language model of the Llama shape, sharing its parameters.

    Raises:
        ExportError: no layers, rotary frequencies that change with the length, or a sliding window that prompts
            would outgrow.
    """
    config, body = model.config, model.model
    needs_layers(body.layers, "num_hidden_layers")
    kind = body.rotary_emb.rope_type
    if any(name in kind for name in CHANGING):
        raise ExportError(f"rotary positions of type {kind!r} change with the length: not supported")
    windows = [layer.self_attn.sliding_window for layer in body.layers if hasattr(layer.self_attn, "sliding_window")]
    window = min((size for size in [*windows, _window(config)] if size), default=limits.positions)
    if window < limits.positions:
        raise ExportError(
            f"prompts of {limits.max_length} tokens and {limits.num_levels} levels outgrow the sliding window of "
            f"{window}; lower max_length"
        )
    weight = body.embed_tokens.weight
    with torch.no_grad():
        places = torch.arange(limits.table_length + limits.table_levels, device=weight.device)
        cosines, sines = body.rotary_emb(weight[:1], places[None])  # [1, positions, D]
    layers = [_Layer(block, cosines[0], sines[0]) for block in body.layers]
    head = Head(model.lm_head.weight, model.lm_head.bias, normalise=normalise)
    decoder = Decoder(_Embed(body), layers, body.norm, head)
    return decoder_graphs(decoder, kv_heads=config.num_key_value_heads, head_dim=cosines.shape[-1])


def _window(config: object) -> int | None:
    """Mistral applies its window to every layer; the others say so per layer."""
    return getattr(config, "sliding_window", None) if getattr(config, "layer_types", None) is None else None


class _Embed(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.tokens = body.embed_tokens

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(tokens)


class _Layer(nn.Module):
    def __init__(self, block: nn.Module, cosines: Tensor, sines: Tensor):
        super().__init__()
        self.block, self.scale = block, block.self_attn.scaling
        self.register_buffer("cosines", cosines, persistent=False)  # [positions, D]
        self.register_buffer("sines", sines, persistent=False)

    def project(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention, x = self.block.self_attn, self.block.input_layernorm(hidden)
        q, k, v = (
            split_heads(projection(x), attention.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return self._rotate(q, positions), self._rotate(k, positions), v

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        cosines, sines = self.cosines[positions].unsqueeze(2), self.sines[positions].unsqueeze(2)  # [B, N, 1, D]
        first, second = x.chunk(2, dim=-1)
        return x * cosines + torch.cat([-second, first], dim=-1) * sines

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden + self.block.self_attn.o_proj(mixed)
        return hidden + self.block.mlp(self.block.post_attention_layernorm(hidden))
