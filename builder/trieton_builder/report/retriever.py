"""What a retriever is and how its prompts are made, in the lines that `export` and `inspect` print."""

from collections.abc import Mapping

from trieton.retriever.spec import RetrieverSpec
from trieton.retriever.token_map import TokenMap


def retriever_facts(spec: RetrieverSpec, origins: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Names and values, without remarks.

    Args:
        origins: for each part of the prompt where it comes from, where that is known.
    """
    origins = origins or {}
    prompt = spec.prompt

    def with_origin(name: str, text: str) -> tuple[str, str]:
        origin = origins.get(name)
        return name.replace("_", " "), f"{text} ({origin})" if origin else text

    facts = [
        ("family", f"{spec.family}, engine {spec.engine}, {spec.dtype}, normalised over the {spec.normalise}"),
        ("vocabulary", f"{spec.vocab_size:,} tokens"),
        ("fingerprint", spec.fingerprint),
        ("prompt", f"{prompt_drawing(spec)}, up to {prompt.longest:,} tokens (at most {spec.max_length:,})"),
        with_origin("prefix", _tokens(prompt.prefix)),
        with_origin("separator", _tokens(prompt.separator)),
        with_origin("suffix", _tokens(prompt.suffix)),
        with_origin("max_items", f"{prompt.max_items:,}"),
        with_origin("end_token", "none" if spec.end_token is None else str(spec.end_token)),
    ]
    if spec.encoder_decoder:
        start = spec.checkpoint.start_token
        facts.append(
            with_origin("start_token", "not known" if start is None else f"{start}, what the decoder reads first")
        )
    facts.append(("padding", "masked; on either side of a prompt the scores are the same"))
    facts += [(f"level {level}", text) for level, text in enumerate(token_map_lines(spec.token_map))]
    return facts


def prompt_drawing(spec: RetrieverSpec) -> str:
    """`1 | item, 9, item, ... | 2`: prefix, items with the separator between them, suffix."""
    prompt = spec.prompt
    between = f", {_plain(prompt.separator)}, " if prompt.separator else ", "
    items = between.join(["item", "item", "..."])
    return " | ".join([*filter(None, [_plain(prompt.prefix)]), items, *filter(None, [_plain(prompt.suffix)])])


def token_map_lines(token_map: TokenMap) -> list[str]:
    """One line per level: how many codes, and their tokens."""
    lines = []
    for tokens in token_map.levels:
        if isinstance(tokens, range):
            lines.append(f"{len(tokens):,} codes, tokens {tokens.start} to {tokens.stop - 1}")
        else:
            lines.append(f"{len(tokens):,} codes, tokens listed, from {min(tokens)} to {max(tokens)}")
    return [f"{line}, shared by levels" if token_map.shared_tokens else line for line in lines]


def _tokens(tokens: tuple[int, ...]) -> str:
    return str(list(tokens)) if tokens else "none"


def _plain(tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens))
