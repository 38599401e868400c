"""Python sources and prose out of wheels of permissively licensed packages."""

from __future__ import annotations

import email
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from kernel_core.check import require
from orchestrator.corpus.document import Document, clean

_ALLOWED = re.compile(r"(?i)\(?(the )?(MIT|BSD|0BSD|Apache|PSF|Python Software Foundation|Zlib|CC0)\b")
_FORBIDDEN = re.compile(r"(?i)GPL|General Public|MPL|Mozilla|Affero|EUPL|proprietary")
# Bundled copies of other packages, whose licences are their own.
_BUNDLED = re.compile(r"(^|/)_?(vendor|vendored|externals?|extern|third_party|bundled|node_modules)(/|$)")
_PROSE = (".md", ".rst", ".txt")
_NO_PROSE = re.compile(r"(?i)licen[cs]e|copying|notice|authors|requirements|\.dist-info/|(^|/)data/|cmake")


@dataclass(frozen=True)
class Package:
    """A package at one version; `licence` as read when it was chosen."""

    name: str
    version: str
    licence: str


def fetch_wheel(package: Package, cache: Path) -> Path:
    """The wheel in `cache`, fetched with pip if it is not there yet. Raises RuntimeError with pip's words."""
    folder = cache / "wheels"
    found = _find(folder, package)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        what = f"{package.name}=={package.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", str(folder), what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = _find(folder, package)
        if done.returncode or found is None:
            raise RuntimeError(f"pip download {what}: {done.stderr.strip()[-500:] or 'no wheel came'}")
    return found


def wheel_licence(wheel: Path) -> str:
    """What the metadata of a wheel says about its licence, in one line."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = email.message_from_bytes(archive.read(name))
    return _licence(metadata)


def check_licence(package: str, licence: str) -> None:
    """Raise ValueError unless every licence named is a permissive one."""
    terms = [term for term in re.split(r"\s+(?:AND|OR)\s+|\s*[;,]\s*", licence) if term]
    fine = bool(terms) and all(_ALLOWED.match(term) for term in terms) and not _FORBIDDEN.search(licence)
    require(fine, "packages", f"{package} under {licence!r}", "BSD, MIT, Apache, PSF and the like")


def wheel_documents(package: Package, wheel: Path) -> Iterator[Document]:
    """Its Python files and its prose, by path. Raises ValueError for a licence that is not permissive."""
    check_licence(package.name, wheel_licence(wheel))
    with zipfile.ZipFile(wheel) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            name = info.filename
            code = name.endswith(".py")
            prose = name.endswith(_PROSE) and not _NO_PROSE.search(name)
            if _BUNDLED.search(name) or not (code or prose):
                continue
            text = clean(archive.read(info))
            if text is not None:
                yield Document(f"{package.name}/{name}", "code" if code else "docs", package.name, text)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _find(folder: Path, package: Package) -> Path | None:
    stem = re.sub(r"[-_.]+", "_", package.name).lower()
    wheels = folder.glob(f"*-{package.version}-*.whl")
    return next((p for p in sorted(wheels) if re.sub(r"[-_.]+", "_", p.name.split("-")[0]).lower() == stem), None)


def _licence(metadata: Message) -> str:
    expression = metadata.get("License-Expression")
    classifiers = [str(c).split("::")[-1].strip() for c in metadata.get_all("Classifier", []) if "License ::" in str(c)]
    field = str(metadata.get("License") or "").strip().splitlines()
    return str(expression or "; ".join(classifiers) or (field[0].strip() if field else ""))
