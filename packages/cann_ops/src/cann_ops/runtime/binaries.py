"""Compiled kernels: where they lie, and the commands that make them with CANN's compiler.

A binary is `NAME-DIGEST.aibin`, an executable of the device, beside `NAME-DIGEST.asc`, the text it was made of; the
digest is that of the text. `python -m cann_ops.build` lowers, writes the text and runs the commands.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from cann_ops.errors import CannUnavailableError
from cann_ops.lowering import Lowered, cache_folder

ARCH = "dav-3510"
_COMPILE = ("-O2", "-fPIC", "-std=c++20", "-mllvm", "-cce-aicore-dcpreload-args=false", f"--npu-arch={ARCH}")
_LINK = ("-m", "aicorelinux", "-Ttext", "0", "--no-mmap-output-file")


def folder() -> Path:
    """CANN_OPS_BINARIES, else a folder beside the lowered kernels."""
    given = os.environ.get("CANN_OPS_BINARIES")
    return Path(given) if given else cache_folder() / "binaries"


def binary_path(lowered: Lowered) -> Path:
    """Where the compiled kernel lies or will lie."""
    digest = hashlib.sha256(lowered.source.encode()).hexdigest()[:24]
    return folder() / f"{lowered.name}-{digest}.aibin"


def tool(name: str) -> str:
    """The path of "bisheng" or "ld.lld": below BISHENG_HOME or ASCEND_HOME_PATH, or on PATH.

    Raises CannUnavailableError where it is not found.
    """
    for variable in ("BISHENG_HOME", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        home = os.environ.get(variable)
        if home and (found := Path(home) / "bin" / name).is_file():
            return str(found)
    on_path = shutil.which(name)
    if on_path is None:
        raise CannUnavailableError(
            f"{name} was not found: it comes with CANN 9.2; source its set_env.sh, or set BISHENG_HOME"
        )
    return on_path


def commands(text: Path, binary: Path, templates: Path, bisheng: str, linker: str) -> list[list[str]]:
    """Compile for the cores alone, then link: the loader takes executables only."""
    part = binary.with_suffix(".o")
    compiled = [bisheng, *_COMPILE, f"-I{templates}", "--cce-aicore-only", str(text), "-o", str(part)]
    return [compiled, [linker, *_LINK, str(part), "-o", str(binary)]]


def build(lowered: Lowered, templates: Path) -> Path:
    """Compile a kernel; returns the binary. CannUnavailableError without the tools, RuntimeError where they fail."""
    binary = binary_path(lowered)
    if binary.is_file():
        return binary
    bisheng, linker = tool("bisheng"), tool("ld.lld")
    binary.parent.mkdir(parents=True, exist_ok=True)
    text = binary.with_suffix(".asc")
    text.write_text(lowered.source, encoding="utf-8")
    part = binary.with_suffix(f".{os.getpid()}")
    for command in commands(text, part, templates, bisheng, linker):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{lowered.kernel}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    part.replace(binary)
    part.with_suffix(".o").unlink(missing_ok=True)
    return binary
