"""All texts of the corpus that people wrote, filtered, with an account of where they come from."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.corpus.debian_docs import LICENCE as DOCS_LICENCE
from orchestrator.corpus.debian_docs import PACKAGE, docs_documents, docs_version, fetch_docs
from orchestrator.corpus.document import Document
from orchestrator.corpus.filters import Copies, limited, why_not
from orchestrator.corpus.heldout import heldout_texts
from orchestrator.corpus.overlap import Guard
from orchestrator.corpus.stdlib import LICENCE as STDLIB_LICENCE
from orchestrator.corpus.stdlib import stdlib_documents, topic_documents
from orchestrator.corpus.wheels import Package, fetch_wheel, file_digest, wheel_documents, wheel_licence

SOURCE_LIMIT = 2_200_000
"""Characters taken from one package at most, so that no single style outweighs the others."""
STDLIB_LIMIT = 20_000_000


@dataclass(frozen=True)
class Source:
    """Where documents come from. `origin` says how to get them."""

    name: str
    version: str
    licence: str
    origin: str


@dataclass
class Gathered:
    """Documents in a fixed order, their sources, and how many were left out for which reason."""

    documents: list[Document] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


class Gatherer:
    """Collects documents source by source. What is held out, generated or a copy of something taken is left out."""

    def __init__(self, seed: int) -> None:
        self.result = Gathered()
        self._seed = seed
        heldout = heldout_texts()
        self._heldout = {name for name, _ in heldout}
        self._guard, self._copies = Guard(heldout), Copies()

    def python(self, limit: int) -> None:
        """The installed library and its help topics, at most `limit` characters of the former."""
        version = platform.python_version()
        self._add(Source("python", version, STDLIB_LICENCE, "installed standard library"), stdlib_documents(), limit)
        topics = Source("python topics", version, STDLIB_LICENCE, "pydoc_data.topics of the standard library")
        self._add(topics, topic_documents(), limit)

    def docs(self, cache: Path) -> None:
        """The documentation's sources, where they can be had."""
        folder = fetch_docs(cache)
        if folder is None:
            self.result.notes.append(f"without the Python documentation: no Debian archive with {PACKAGE} here")
            return
        source = Source("python docs", docs_version(folder), DOCS_LICENCE, f"Debian package {PACKAGE}")
        self._add(source, docs_documents(folder), STDLIB_LIMIT)

    def package(self, package: Package, cache: Path) -> None:
        """One package. Raises RuntimeError if it cannot be fetched, ValueError for a licence that is not permissive."""
        wheel = fetch_wheel(package, cache)
        origin = f"wheel {wheel.name}, SHA-256 {file_digest(wheel)}"
        source = Source(package.name, package.version, wheel_licence(wheel), origin)
        self._add(source, wheel_documents(package, wheel), SOURCE_LIMIT)

    def _add(self, source: Source, documents: Iterable[Document], limit: int) -> None:
        self.result.sources.append(source)
        self.result.documents += limited(documents, limit, self._seed, self._accept)

    def _accept(self, document: Document) -> bool:
        reason = "held out" if document.name in self._heldout else why_not(document.text)
        if reason is None and not self._guard.passes(document.text):
            reason = "shares lines with held-out text"
        reason = reason or self._copies.why_not(document.text)
        if reason is not None:
            self.result.dropped[reason] += 1
        return reason is None


def gather(
    cache: Path,
    packages: Iterable[Package],
    *,
    seed: int = 0,
    limit_bytes: int | None = None,
    progress: Callable[[str], None] = lambda source: None,
) -> Gathered:
    """Everything, or with `limit_bytes` so much of the installed library and nothing else.

    `progress` is told the name of a source before it is read.
    """
    gatherer = Gatherer(seed)
    progress("python")
    gatherer.python(STDLIB_LIMIT if limit_bytes is None else limit_bytes)
    if limit_bytes is None:
        progress("python docs")
        gatherer.docs(cache)
        for package in packages:
            progress(package.name)
            gatherer.package(package, cache)
    return gatherer.result
