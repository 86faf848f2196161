"""Where nothing may be written: inside a bundle, which never changes, and inside a model repository.

The server takes what appears in a repository for a model or a version, and a version with one more file for a new one.
"""

from pathlib import Path

from trieton_builder.bundle.model_config import MODEL_NAME

# By name, not from `trieton.bundle`: that import takes longer than most commands.
_BUNDLE_FILES = ("manifest.json", "model.py")


def refuse_inside(*paths: Path | None) -> None:
    """Refuse files or folders to write that lie inside a bundle or a model repository; None is none.

    Raises:
        ValueError: names the path and what it lies in.
    """
    for path in paths:
        for folder in [] if path is None else path.resolve().parents:
            if _is_bundle(folder):
                raise ValueError(f"{path}: lies inside the bundle {folder}, which never changes; choose another place")
            if _is_model(folder) or _is_repository(folder):
                raise ValueError(
                    f"{path}: lies inside the model repository {folder.parent if _is_model(folder) else folder}, where "
                    "the server takes what it finds for models and versions; choose another place"
                )


def refuse_as_repository(root: Path) -> None:
    """Refuse a folder of models that is a bundle or a single model, or lies inside a bundle or another repository.

    Raises:
        ValueError: names `root` and what is wrong with it.
    """
    if _is_bundle(root) or _is_model(root):
        what = "a bundle" if _is_bundle(root) else f"a model of the repository {root.parent}"
        raise ValueError(f"{root}: is {what}; expected a folder of models, or a new one")
    refuse_inside(root)


def _is_bundle(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _BUNDLE_FILES)


def _is_model(folder: Path) -> bool:
    return (folder / "config.pbtxt").is_file()


def _is_repository(folder: Path) -> bool:
    # The folder beside it is there before its first version.
    return _is_model(folder / MODEL_NAME) or Path(f"{folder}.rollout").is_dir()
