"""What is checked before a version appears: its number, room, named sets, configuration."""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

from trieton_builder.bundle.model_config import render_config
from trieton_builder.bundle.write import check_base as check_base_constraint
from trieton_builder.rollout.errors import RolloutError
from trieton_builder.rollout.ledger import Ledger
from trieton_builder.rollout.repository import Repository, read_manifest
from trieton_builder.rollout.source import Source
from trieton_builder.rollout.targets import Target

SPARE = 64 << 20  # bytes that must stay free on the disk


def next_version(targets: Sequence[Target], wanted: int | None) -> int:
    """Above every number that the ledger, the folders or a server has ever seen.

    Raises:
        RolloutError: `wanted` is none of them; or a server is away or wants another key.
    """
    highest = 0
    for target in targets:
        repository = target.repository
        known = [Ledger(repository.state).highest(), *repository.versions(), *repository.withdrawn_versions()]
        seen = [number for control in target.servers for number in control.states()]
        highest = max([highest, *known, *seen])
    if wanted is None:
        return highest + 1
    if wanted <= highest:
        raise RolloutError(
            f"version {wanted}: expected a number above {highest}, the highest ever used here; numbers are not "
            "reused, because caches and clients may still mean the old content by them"
        )
    return wanted


def check_room(source: Source, repository: Repository) -> None:
    """What has to be copied must fit on the disk of the repository. Raises RolloutError."""
    size = source.size(repository.published_files())
    free = shutil.disk_usage(repository.root.parent).free
    if free < size + SPARE:
        raise RolloutError(
            f"{repository.root.parent}: {free / 2**20:,.0f} MiB free, expected {(size + SPARE) / 2**20:,.0f} MiB "
            "for this bundle; trieton prune removes old versions"
        )


def check_sets(source: Source, repository: Repository, previous: int | None, note: Callable[[str], None]) -> None:
    """Every named set that the current version has must be in the new one, or be given up on purpose."""
    if previous is None:
        return
    try:
        live = read_manifest(repository.path(previous))
    except RolloutError as error:
        note(f"its named sets are not compared with those of version {previous} ({error})")
        return
    dropped = sorted(set(live.get("sets") or {}) - set(source.manifest.get("sets") or {}))
    if dropped:
        raise RolloutError(
            f"{source.address} lacks named sets that version {previous} of {repository} has: "
            f"{', '.join(dropped)}; requests that name them would fail. Add them, or publish with "
            "--allow-dropped-sets"
        )


def check_config(repository: Repository, bundle: Any) -> None:
    """The ids of the bundle must be of the type that the repository's configuration says."""
    if not repository.config.is_file():
        return
    text = repository.config.read_text()
    declared = "TYPE_STRING" if _type_of(text, "item_ids") == "TYPE_STRING" else "TYPE_INT64"
    needed = "TYPE_STRING" if bundle.index.catalog.is_text else "TYPE_INT64"
    if declared != needed:
        raise RolloutError(
            f"{repository.config} declares item ids of {declared}, the bundle has {needed}; publish it into a new "
            "repository, since clients of this one expect the other type"
        )


def check_base(bundle: Any) -> None:
    """Refuse a bundle whose base constraint allows nothing: each of its answers would be empty."""
    try:
        check_base_constraint(bundle.index, bundle.manifest.get("base_constraint"))
    except ValueError as error:
        raise RolloutError(f"{bundle.path}: {error}") from None


def config_text(repository: Repository, bundle: Any) -> str:
    """The model's configuration: the repository's own, or what a first publish writes."""
    if repository.config.is_file():
        return repository.config.read_text()
    return render_config(text_ids=bundle.index.catalog.is_text)


def _type_of(config: str, tensor: str) -> str | None:
    """data_type of a tensor in a config.pbtxt."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    parsed = text_format.Parse(config, model_config_pb2.ModelConfig())
    for output in parsed.output:
        if output.name == tensor:
            return model_config_pb2.DataType.Name(output.data_type)
    return None
