"""Sources of the Python documentation, from Debian's package of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from orchestrator.corpus.document import Document, clean

PACKAGE = "python3.11-doc"
LICENCE = "PSF-2.0"


def fetch_docs(cache: Path) -> Path | None:
    """The unpacked package below `cache`, fetched if it is not there yet. None where Debian's tools or its archive
    are missing: the corpus does without."""
    folder = cache / "debian"
    unpacked = folder / PACKAGE
    if unpacked.is_dir():
        return unpacked
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(f"{PACKAGE}_*.deb")):
        done = subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, check=False)
        if done.returncode:
            return None
    archive = max(folder.glob(f"{PACKAGE}_*.deb"))
    partial = folder / f"{PACKAGE}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    subprocess.run(["dpkg-deb", "-x", str(archive), str(partial)], check=True)
    (partial / "VERSION").write_text(archive.name.split("_")[1])
    partial.rename(unpacked)
    return unpacked


def docs_version(folder: Path) -> str:
    """Version of the unpacked package. It is the archive's current one: Debian keeps no older ones."""
    return (folder / "VERSION").read_text()


def docs_documents(folder: Path) -> Iterator[Document]:
    """One document a page, by path."""
    for root in sorted(folder.rglob("_sources")):
        for path in sorted(root.rglob("*.rst.txt")):
            text = clean(path.read_bytes())
            if text is not None:
                name = path.relative_to(root).as_posix().removesuffix(".txt")
                yield Document(f"python-docs/{name}", "docs", "python docs", text)
