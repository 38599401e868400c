"""`fathom bench` and `fathom test`: other programs of the checkout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from orchestrator.commands.paths import need_root

TEST_FOLDERS = ("packages", "orchestrator", "bench", "tests")


def bench(args: Sequence[str]) -> int:
    """Run the benchmark runner at the root of the checkout."""
    root = need_root("fathom bench")
    return subprocess.run([sys.executable, "-m", "bench", *args], cwd=root).returncode


def test(args: Sequence[str]) -> int:
    """Run pytest over every suite; a path among `args` takes the place of the usual folders."""
    root = need_root("fathom test")
    own = any(not arg.startswith("-") and (root / arg.split("::", 1)[0]).exists() for arg in args)
    folders = [] if own else [folder for folder in TEST_FOLDERS if (root / folder).is_dir()]
    return subprocess.run([sys.executable, "-m", "pytest", *folders, *args], cwd=root).returncode
