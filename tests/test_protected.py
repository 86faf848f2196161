"""No command writes into a bundle or among the models of a repository."""

import os
from pathlib import Path

import numpy as np
import pytest
from rollout_help import command_here, one_line
from trieton_builder.bundle.model_config import MODEL_NAME
from trieton_builder.bundle.protected import refuse_as_repository, refuse_inside
from trieton_builder.rollout import publish


@pytest.fixture
def places(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A folder with a repository, `models`, and what the commands read."""
    publish(tiny_bundle, tmp_path / "models", servers=[], preflight=False)
    (tmp_path / "items.csv").write_text("item_id,code_0\n1,1\n")
    (tmp_path / "sets.csv").write_text("item_id,even\n1000,1\n")
    np.save(tmp_path / "vectors.npy", np.eye(4))
    return tmp_path


@pytest.mark.parametrize("inside", [f"models/{MODEL_NAME}/1", f"models/{MODEL_NAME}", "models"])
def test_no_command_writes_into_a_bundle_or_a_repository(
    places: Path, tiny_bundle: Path, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places)
    before = sorted(places.rglob("*"))
    out, bundle = f"{inside}/new", tiny_bundle
    commands: list[tuple[object, ...]] = [
        ("build", "items.csv", "--codebook-sizes", "2", "-o", out),
        ("build", "items.csv", "-o", out, "--retriever", bundle / "retriever"),
        ("build", "items.csv", "--codebook-sizes", "2", "-o", "index", "--work-dir", inside),
        ("semantic-ids", "vectors.npy", "--codebook-sizes", "2", "-o", f"{out}.csv"),
        ("export", "checkpoint", "--token-map", "map.json", "--out", out),
        ("inspect", bundle, "--html", out),
        ("explain", "1000", "--bundle", bundle, "--html", out),
        ("refresh", bundle, "--sets", "sets.csv", "--out", out),
        ("publish", bundle, out),
        ("publish", bundle, out, "--dry-run"),
        ("canary", "record", "models", "--output", out),
        ("demo", "--workdir", inside),
    ]
    for arguments in commands:
        assert f": lies inside the {'bundle' if inside[-1] == '1' else 'model repository'} " in one_line(
            command_here(*arguments)
        ), arguments
    assert sorted(places.rglob("*")) == before


def test_a_bundle_or_a_model_is_no_repository(places: Path, tiny_bundle: Path) -> None:
    version, model = places / "models" / MODEL_NAME / "1", places / "models" / MODEL_NAME
    for name, place, text in (("bundle", version, "is a bundle"), ("model", model, "is a model of the repository")):
        for arguments in (("publish", tiny_bundle, place), ("serve", place)):
            assert f"{place}: {text}" in one_line(command_here(*arguments)), name
    assert sorted(os.listdir(places / "models")) == [MODEL_NAME]
    (places / "empty").mkdir()
    (places / "empty.rollout").mkdir()  # a repository whose first version is still to come
    with pytest.raises(ValueError, match="lies inside the model repository"):
        refuse_inside(places / "empty" / "x")
    refuse_as_repository(places / "empty")
    refuse_inside(places / "new", None)
