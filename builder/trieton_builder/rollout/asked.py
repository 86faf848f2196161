"""Models of the server that a bundle's retriever asks (engine bls): there, and ready, before a version that needs them.

They are published by their owner, into the same repository or wherever the servers have them from; a rollout of a
bundle only makes sure of them, loads them where that was not done, and never takes them away.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from trieton.retriever.spec import SPEC_FILE
from tritonclient.grpc import model_config_pb2

from trieton_builder.rollout.control import ServerControl
from trieton_builder.rollout.errors import RolloutError
from trieton_builder.rollout.repository import Repository

INSTEAD = (
    "publish with --no-preflight: then the canary requests to the real server decide, and at the first that fails "
    "everything is as it was"
)


@dataclass(frozen=True)
class Asked:
    """A model, and the one version of it that will be asked."""

    name: str
    version: int


def asked_by(version_dir: Path) -> list[Asked]:
    """The models that a bundle's retriever asks; none where it runs by itself. Raises RolloutError: not readable."""
    folder = version_dir / "retriever"
    if not (folder / SPEC_FILE).is_file():  # no bundle: whoever opens it says so
        return []
    try:
        if json.loads((folder / SPEC_FILE).read_text())["engine"] != "bls":
            return []
        from trieton.retriever.bls import read_models  # only here: a rollback in a hurry seldom needs an engine

        models = {Asked(model.name, model.version) for model in read_models(folder)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RolloutError(f"{folder}: {error}") from None
    return sorted(models, key=lambda model: (model.name, model.version))


def lend(asked: list[Asked], repository: Repository, staged: Path | None) -> None:
    """Put links to the models into the small repository `staged` of a throw-away server; None only checks.

    Raises:
        RolloutError: a model is not in the repository, or needs a backend that a throw-away server has not.
    """
    for model in asked:
        own = repository.root / model.name
        if not (own / str(model.version)).is_dir() or not (own / "config.pbtxt").is_file():
            raise RolloutError(
                f"the bundle's retriever asks model {model.name}, version {model.version}, which {repository.root} "
                f"does not have: put it there; or, where the servers have it from elsewhere, {INSTEAD}"
            )
        config = (own / "config.pbtxt").read_text()
        backend = text_format.Parse(config, model_config_pb2.ModelConfig()).backend
        if backend != "python":
            raise RolloutError(
                f"{own}: backend {backend or 'of a platform'!r} is not in the throw-away server, which has only "
                f"'python'; {INSTEAD}"
            )
        if staged is not None and not (staged / model.name / str(model.version)).exists():
            (staged / model.name).mkdir(exist_ok=True)
            (staged / model.name / "config.pbtxt").write_text(config)
            (staged / model.name / str(model.version)).symlink_to(own.resolve() / str(model.version))


def make_ready(asked: list[Asked], control: ServerControl, note: Any) -> None:
    """See that a server has the models, and load those that it does not hold.

    Raises:
        RolloutError: it cannot have one of them ready.
    """
    for model in asked:
        state, _ = control.states(model.name).get(model.version, ("unknown", ""))
        if state == "READY":
            continue
        note(f"{control.url} loads {model.name}, which the bundle's retriever asks")
        control.load_other(model.name)
        state, reason = control.states(model.name).get(model.version, ("unknown", ""))
        if state != "READY":
            raise RolloutError(
                f"{control.url}: the bundle's retriever asks model {model.name}, version {model.version}, which is "
                f"{state} there{f' ({reason})' if reason else ''}: load it first"
            )
