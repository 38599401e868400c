"""A fingerprint of the sources that made a kernel, so that a stale measurement can be named."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from kernel_core.paths import include_dir

_CORE = ("include/**/*", "cmake/**/*")
_SKIPPED = {".so", ".pyc", ".o"}


def source_digest(package: Path, sources: Sequence[str], device: str = "cpu") -> str:
    """First 16 hex digits of SHA-256 over the files below `package` that match the globs, and kernel_core's headers.

    Names relative to the package and contents count; dates and places do not. What belongs to the other device is left
    out: for "cpu" folders named cuda, files with Cuda in their name and Triton's, for "cuda" folders named cpu.
    """
    digest = hashlib.sha256()
    for root, globs in ((package, sources), (include_dir().parent, _CORE)):
        files = {path for pattern in globs for path in root.glob(pattern) if path.is_file()}
        for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
            if path.suffix in _SKIPPED or _foreign(path.relative_to(root), device):
                continue
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _foreign(path: Path, device: str) -> bool:
    if device == "cuda":
        return "cpu" in path.parts
    return "cuda" in path.parts or "Cuda" in path.name or "_cuda" in path.stem or path.name.startswith("triton_")
