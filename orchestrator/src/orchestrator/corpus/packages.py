"""The pinned packages of the corpus."""

from __future__ import annotations

from pathlib import Path

from orchestrator.corpus.wheels import Package


def read_packages(text: str) -> tuple[Package, ...]:
    """Packages from lines of name, version and licence; empty lines and lines with `#` in front are skipped."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(Package(*line.split(maxsplit=2)) for line in lines if line and not line.startswith("#"))


PACKAGES = read_packages((Path(__file__).parent / "packages.txt").read_text(encoding="utf-8"))
