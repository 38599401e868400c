"""Imports run one way: orchestrator and bench import packages, a package imports kernel_core and no other of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
OURS = {*PACKAGES, "orchestrator", "bench"}


def imported(folder: Path) -> Iterator[tuple[str, str]]:
    """(place, top-level name) of every absolute import below `folder`, also those inside functions."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", name.split(".")[0]


def test_there_are_packages():
    assert "kernel_core" in PACKAGES and len(PACKAGES) > 1


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_kernel_core_of_ours(package):
    allowed = {package, "kernel_core"}
    wrong = [
        f"{place} imports {name}"
        for part in ("src", "tests", "bench")
        for place, name in imported(ROOT / "packages" / package / part)
        if name in OURS - allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_declares_no_other_sister(package):
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    named = {name for name in OURS - {package, "bench"} if f'"{name}"' in text}
    assert named <= {"kernel_core"}, f"{package} depends on {sorted(named)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_includes_only_headers_of_its_own_and_kernel_core(package):
    others = set(PACKAGES) - {package, "kernel_core"}
    wrong = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for pattern in ("*.hpp", "*.cpp", "*.cuh", "*.cu")
        for path in (ROOT / "packages" / package).glob(f"csrc/**/{pattern}")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.lstrip().startswith("#include") and any(f"{other}/" in line for other in others)
    ]
    assert not wrong, "\n".join(wrong)
