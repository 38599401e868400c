"""Functions of a test file in a process of their own, for settings that count from the first import on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def load_file(path: str | Path) -> ModuleType:
    """A Python file as a module, whatever its place."""
    path = Path(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call_in_child(path: str | Path, call: str, **environment: str) -> object:
    """Evaluate `call`, such as ``errors(90)``, in a new process that has loaded the file; returns it through JSON.

    Raises `AssertionError` with the end of what the process wrote if it fails.
    """
    program = (
        "import json\nfrom kernel_core.testing.child import load_file\n"
        f"module = load_file({str(path)!r})\nprint(json.dumps(module.{call}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
