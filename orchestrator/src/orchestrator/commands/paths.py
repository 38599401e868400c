"""Where the project, its models and its caches are."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from orchestrator.commands.errors import UsageError

DEFAULT_MODEL = "v41-mini"
SMALL_MODELS = ("v41-mini", "v41-nano")


def project_root() -> Path | None:
    """The checkout that this code runs from, or None for an installed wheel."""
    named = os.environ.get("FATHOM_ROOT")
    root = Path(named) if named else Path(__file__).resolve().parents[4]
    return root if (root / "packages").is_dir() and (root / "orchestrator").is_dir() else None


def need_root(what: str) -> Path:
    """The checkout, for commands that work on it."""
    root = project_root()
    if root is None:
        raise UsageError(f"{what} needs a checkout of Fathom; run ./fathom in one, or set FATHOM_ROOT to its folder")
    return root


def cache_folder() -> Path:
    """Where models made on first use are kept: `.fathom` in the checkout, else the user's cache."""
    root = project_root()
    if root is not None and os.access(root, os.W_OK):
        return root / ".fathom"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fathom"


def find_model(model: str | None) -> Path:
    """The folder of a model: a path, the name of a small model, or the default if None.

    A small model that is not there yet is made, with random weights, and kept. Raises UsageError otherwise.
    """
    root = project_root()
    if model is not None and is_model(Path(model)):
        return Path(model)
    name = model or DEFAULT_MODEL
    if root is not None and is_model(root / "models" / name):
        return root / "models" / name
    if name in SMALL_MODELS:
        return _random_model(name)
    if Path(name).is_dir():
        raise UsageError(f"{name} has no config.json; `fathom init {DEFAULT_MODEL} {name}` writes a model there")
    names = " or ".join(SMALL_MODELS)
    raise UsageError(f"No model {name!r}: give the folder of a checkpoint, or {names} for a small one")


def is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _random_model(name: str) -> Path:
    folder = cache_folder() / "models" / name
    if is_model(folder):
        return folder
    note = f"Writing {name} to {folder}: random weights, untrained, so what it says is noise."
    print(note, file=sys.stderr, flush=True)
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import preset

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as made:
        make_model(preset(name), Path(made) / name)
        try:
            (Path(made) / name).rename(folder)
        except OSError:  # another process was first, or left half a folder behind
            if not is_model(folder):
                shutil.rmtree(folder, ignore_errors=True)
                (Path(made) / name).rename(folder)
    return folder
