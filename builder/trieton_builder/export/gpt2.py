"""GPT2LMHeadModel: learned positions, layer norm, one projection for queries, keys and values."""

from torch import Tensor, nn

from trieton_builder.export.attention import Head, split_heads
from trieton_builder.export.decoder import Decoder, decoder_graphs
from trieton_builder.export.family import ExportError, Graphs, Limits, needs_layers


def gpt2_graphs(model: nn.Module, limits: Limits, normalise: str) -> Graphs:
    """The graphs of a GPT2LMHeadModel, sharing its parameters.

    Raises:
        ExportError: no layers, or prompt and semantic ID together are longer than the model's table of positions.
    """
    config, body = model.config, model.transformer
    needs_layers(body.h, "n_layer")
    if limits.positions > config.n_positions:
        raise ExportError(
            f"prompts of {limits.max_length} tokens and {limits.num_levels} levels need {limits.positions} positions, "
            f"the model has {config.n_positions}; lower max_length"
        )
    head = Head(model.lm_head.weight, model.lm_head.bias, normalise=normalise)
    decoder = Decoder(_Embed(body), [_Layer(block) for block in body.h], body.ln_f, head)
    return decoder_graphs(decoder, kv_heads=config.n_head, head_dim=config.n_embd // config.n_head)


class _Embed(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.tokens, self.positions = body.wte, body.wpe

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(positions)


class _Layer(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.block, self.scale = block, block.attn.scaling

    def project(self, hidden: Tensor, positions: Tensor) -> list[Tensor]:
        attention = self.block.attn
        joined = attention.c_attn(self.block.ln_1(hidden))
        return [split_heads(part, attention.head_dim) for part in joined.split(attention.split_size, dim=2)]

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden + self.block.attn.c_proj(mixed)
        return hidden + self.block.mlp(self.block.ln_2(hidden))
