"""Python's own library and its help topics, as installed."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from orchestrator.corpus.document import Document, clean

LICENCE = "PSF-2.0"
_LEFT_OUT = ("site-packages", "dist-packages", "__pycache__", "lib-dynload", "pydoc_data")


def stdlib_root() -> Path:
    """Folder of the installed standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_documents(root: Path | None = None) -> Iterator[Document]:
    """All its sources, tests included, by path. Not the build settings: they name folders of this machine."""
    root = root or stdlib_root()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in _LEFT_OUT or part.startswith("config-") for part in path.relative_to(root).parts):
            continue
        if path.name.startswith("_sysconfigdata"):
            continue
        text = clean(path.read_bytes())
        if text is not None:
            yield Document(f"python/{name}", "code", "python", text)


def topics() -> dict[str, str]:
    """Help topics (`help("LOOPING")` and the like) by name, plain text. Empty where Python came without them."""
    try:
        from pydoc_data.topics import topics as found
    except ImportError:
        return {}
    return dict(sorted(found.items()))


def topic_documents() -> Iterator[Document]:
    """One document a topic."""
    for name, text in topics().items():
        yield Document(f"topic/{name}", "docs", "python topics", text)
