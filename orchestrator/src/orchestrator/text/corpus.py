"""The training text of the small tokenizers: sources of Python's own standard library.

Every reader of this project has that text, so the tokenizer can be made again without a download. Sources change
between patch releases of Python; the digest says whether two corpora are the same bytes.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

#: Folders below the library root. Distributions strip test suites, Tk and the like, so none of those is used.
FOLDERS: tuple[str, ...] = (
    ".",
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
)
FOLDERS += ("multiprocessing", "pydoc_data", "sqlite3", "tomllib", "urllib", "wsgiref", "xml", "zoneinfo")
FILE_LIMIT = 800_000  # pydoc_data/topics.py, the largest piece of plain English, is just below
TOTAL_LIMIT = 6_000_000


def corpus_files(root: Path | None = None) -> list[Path]:
    """Sources in a fixed order. Modules that start with an underscore are left out: some are written at build time."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = [path for folder in FOLDERS for path in (root / folder).glob("*.py") if not path.name.startswith("_")]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_corpus(root: Path | None = None) -> list[str]:
    """Texts of the corpus, at most `TOTAL_LIMIT` bytes in all. Raises FileNotFoundError if there is none."""
    texts, total = [], 0
    for path in corpus_files(root):
        data = path.read_bytes()
        if len(data) > FILE_LIMIT or total + len(data) > TOTAL_LIMIT:
            continue
        total += len(data)
        texts.append(data.decode("utf-8", errors="replace").replace("\r\n", "\n"))
    if not texts:
        raise FileNotFoundError("the standard library has no sources here; training needs a Python with its .py files")
    return texts


def corpus_digest(texts: list[str]) -> str:
    """SHA-256 over lengths and bytes of the texts, in order."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
