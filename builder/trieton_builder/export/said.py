"""What the files of a checkpoint say about prompts: BOS and EOS, what the tokenizer adds, where the decoder starts."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trieton_builder.export.family import ExportError

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_CONFIG, TOKENIZER = "tokenizer_config.json", "tokenizer.json"
ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "pegasus")  # where config.json does not say it
# Settings of `generate` that change which list comes out, with the values that do nothing. The search has none of them.
SETTINGS: dict[str, tuple] = {
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None, {}, []),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "repetition_penalty": (None, 1, 1.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
}
FORBIDDING = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")


@dataclass
class Said:
    """What a checkpoint says, each part with the file where it stands.

    Attributes:
        encoder_decoder: whether an encoder reads the prompt.
        vocab_size, positions: of config.json; None where it does not say.
        prefix, suffix: tokens in front of and behind every text.
        end_token: what ends an answer, EOS.
        start_token: what the decoder of an encoder-decoder starts with.
        origins: for prefix, suffix, end_token and start_token, in words, where that comes from or why it is empty.
        forbidden: tokens that `generate` would not write.
        remarks: what does not fit together.
    """

    encoder_decoder: bool = False
    vocab_size: int | None = None
    positions: int | None = None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    end_token: int | None = None
    start_token: int | None = None
    origins: dict[str, str] = field(default_factory=dict)
    forbidden: frozenset[int] = frozenset()
    remarks: list[str] = field(default_factory=list)


def read_said(folder: str | Path) -> Said:
    """Read config.json and, where they are there, generation_config.json and the tokenizer's two files.

    Raises:
        ExportError: a file that is no JSON object, or a token that is no number; names file and field.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ExportError(f"{folder / CONFIG}: missing; expected a Hugging Face checkpoint on disk")
    config, generation, tokenizer = (_object(folder / name) for name in (CONFIG, GENERATION, TOKENIZER_CONFIG))
    kind = config.get("model_type")
    said = Said(
        encoder_decoder=config.get("is_encoder_decoder", kind in ENCODER_DECODERS) is True,
        vocab_size=_size(config.get("vocab_size")),
        positions=_size(config.get("max_position_embeddings")),
    )
    files = {folder / CONFIG: config, folder / GENERATION: generation}
    bos, bos_origin = _special(files, "bos_token_id", said)
    eos, said.origins["end_token"] = _special(files, "eos_token_id", said)
    said.end_token = eos
    added = _added_by_tokenizer(folder / TOKENIZER)
    first: tuple[int, ...] = () if bos is None else (bos,)
    last: tuple[int, ...] = () if eos is None else (eos,)
    usual: tuple[tuple[int, ...], ...] = ((), last) if said.encoder_decoder else (first, ())
    origins = bos_origin, said.origins["end_token"] if said.encoder_decoder else "a decoder's prompt goes on"
    sides = (("prefix", "add_bos_token", first), ("suffix", "add_eos_token", last))
    for side, (name, switch, special) in enumerate(sides):
        asked = tokenizer.get(switch)
        if type(asked) is bool:
            tokens = special if asked else ()
            origin = f"{switch} is {str(asked).lower()} in {TOKENIZER_CONFIG}"
        elif added is not None:
            tokens, origin = added[side], f"{TOKENIZER} adds {list(added[side]) or 'none'}"
        else:
            tokens, origin = usual[side], origins[side]
        setattr(said, name, tokens)
        said.origins[name] = origin
    if said.encoder_decoder:
        said.start_token, said.origins["start_token"] = _start(files, said)
    _settings(folder / GENERATION, generation, said)
    _drop_outside(said)
    return said


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path}: not readable ({error})") from None
    if not isinstance(fields, dict):
        raise ExportError(f"{path}: expected an object, got {type(fields).__name__}")
    return fields


def _size(value: Any) -> int | None:
    return value if type(value) is int else None


def _tokens(path: Path, fields: dict[str, Any], name: str) -> list[int]:
    """The token or tokens of a field; none where it is missing or null."""
    value = fields.get(name)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in tokens):
        raise ExportError(f"{path}: {name}: expected a token or a list of them, got {value!r}")
    return list(dict.fromkeys(tokens))


def _special(files: dict[Path, dict[str, Any]], name: str, said: Said) -> tuple[int | None, str]:
    """The one token that the files agree on, and where it stands."""
    found = {path.name: tokens for path, fields in files.items() if (tokens := _tokens(path, fields, name))}
    if not found:
        return None, f"the checkpoint names no {name}"
    common = [token for token in next(iter(found.values())) if all(token in tokens for tokens in found.values())]
    if len(common) == 1:
        return common[0], f"{name} of {next(iter(found))}"
    listed = ", ".join(f"{tokens} in {file}" for file, tokens in found.items())
    said.remarks.append(f"{name}: {listed}: not one token, so none is taken; declare what the model was trained with")
    return None, f"{name} is not one token"


def _start(files: dict[Path, dict[str, Any]], said: Said) -> tuple[int | None, str]:
    name = "decoder_start_token_id"
    found = {path.name: tokens[0] for path, fields in files.items() if (tokens := _tokens(path, fields, name))}
    if not found:
        return None, f"the checkpoint names no {name}"
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{token} in {file}" for file, token in found.items())
        said.remarks.append(f"{name}: {listed}; the one of {CONFIG}, by which training shifts its labels, is taken")
    file, token = next(iter(found.items()))
    return token, f"{name} of {file}"


def _added_by_tokenizer(path: Path) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Tokens that the tokenizer puts in front of and behind a text; None where there is no such file."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    if not path.is_file():
        return None
    # Its post-processor alone on a text of one token: what the text itself becomes does not matter.
    probe = Tokenizer(WordLevel({"x": 0}, unk_token="x"))
    try:
        processor = Tokenizer.from_file(str(path)).post_processor
        if processor is None:
            return (), ()
        probe.post_processor = processor
        encoded = probe.encode("x")
    except Exception as error:  # the library raises plain Exception for a damaged file
        raise ExportError(f"{path}: not readable ({' '.join(str(error).split())[:200]})") from None
    text = encoded.special_tokens_mask.index(0)
    return tuple(encoded.ids[:text]), tuple(encoded.ids[text + 1 :])


def _settings(path: Path, generation: dict[str, Any], said: Said) -> None:
    used = [name for name, nothing in SETTINGS.items() if generation.get(name) not in nothing]
    tokens: set[int] = set()
    for name in (name for name in used if name in FORBIDDING):
        value = generation[name]
        entries = value if isinstance(value, list) else [value]
        # Longer words are forbidden as a whole, not their tokens.
        flat = [entry[0] if isinstance(entry, list) and len(entry) == 1 else entry for entry in entries]
        tokens |= {token for token in flat if type(token) is int}
    said.forbidden = frozenset(tokens)
    if used:
        said.remarks.append(
            f"{path.name}: {', '.join(used)}: not applied; the search adds up the model's own log-probabilities, and "
            "the catalogue and the constraint alone forbid"
        )


def _drop_outside(said: Said) -> None:
    """Default configs name tokens of the model that they were written for, such as GPT-2's 50256."""
    size = said.vocab_size

    def inside(token: int) -> bool:
        return token >= 0 and (size is None or token < size)

    for name in ("prefix", "suffix"):
        tokens = getattr(said, name)
        if not all(map(inside, tokens)):
            _leave_out(said, name, tokens, f"lies outside the vocabulary of {size}")
    if said.end_token is not None and not inside(said.end_token):
        _leave_out(said, "end_token", said.end_token, f"lies outside the vocabulary of {size}")


def _leave_out(said: Said, name: str, tokens: Any, why: str) -> None:
    shown = list(tokens) if isinstance(tokens, tuple) else tokens
    said.remarks.append(f"{name}: {said.origins[name]}: {shown} {why}: not taken")
    said.origins[name] = f"{said.origins[name]}, {shown}, {why}"
    setattr(said, name, () if isinstance(tokens, tuple) else None)
