"""What a model family hands to the exporter."""

from collections.abc import Sized
from dataclasses import dataclass

from torch import nn

MIN_LENGTH, MIN_LEVELS = 16, 32  # another token map of more levels may then stand over the same graphs


class ExportError(ValueError):
    """A model that cannot be exported, or graphs that do not compute what the model computes."""


def needs_layers(layers: Sized, name: str) -> None:
    """Refuse a model without layers: there is nothing whose keys and values a graph could hand out."""
    if not len(layers):
        raise ExportError(f"config: {name}: expected at least one layer, got none")


@dataclass(frozen=True)
class Limits:
    """Sizes of what a retriever declares, and of the tables inside its graphs, which are never shorter than that.

    Attributes:
        max_length: prompt tokens at most.
        num_levels: levels of a semantic ID.
    """

    max_length: int
    num_levels: int

    @property
    def positions(self) -> int:
        """Positions that a prompt and the codes behind it take: the last code is never read."""
        return self.max_length + self.num_levels - 1

    @property
    def table_length(self) -> int:
        return max(self.max_length, MIN_LENGTH)

    @property
    def table_levels(self) -> int:
        return max(self.num_levels, MIN_LEVELS)


@dataclass(frozen=True)
class Graphs:
    """The two modules of a retriever, with the shapes of their keys and values.

    Attributes:
        prefill: (input_ids [B, S], attention_mask [B, S], level_tokens [W]) ->
            (logits [B, 1, W], log_z [B, 1], prefix) and, where `first_suffix`, present.
        decode: (input_ids [B, M], parents [B, M], attention_mask [B, S], level_tokens [W], prefix, past) ->
            (logits [B, M, W], log_z [B, M], present).
            prefix: per layer keys and values [B, G, S, D]; past and present: [B, P, G, t, D] and [B, M, G, t + 1, D].
        num_layers, kv_heads, head_dim: layers, G and D.
        first_suffix: prefill already puts a token into the suffix, the start token of an encoder-decoder.
    """

    prefill: nn.Module
    decode: nn.Module
    num_layers: int
    kv_heads: int
    head_dim: int
    first_suffix: bool
