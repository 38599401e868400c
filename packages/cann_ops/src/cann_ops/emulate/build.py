"""Compiling generated source with g++ against the emulator. What was compiled is kept by the digest of its text."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from cann_ops.emulate.errors import CompileError
from cann_ops.emulate.source import translate

_COMMON = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-strict-aliasing", "-ffp-contract=off")
# The hooks that replace the sanitizer's library see each access of generated code through a pointer.
_KERNEL = ("-O1", "-w", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
_RUNTIME = ("-O2", "-Wall", "-Wextra", "-Werror")
_MISSING = re.compile(
    r"'((?:::|simd_inst::|tl::)?(?:asc_|v[a-z]|tl|simd)\w*)' (?:was not declared|is not a member|has not)"
)
_UNSUPPORTED = re.compile(r"static assertion failed: (.+)")


def emulator_dir() -> Path:
    """The folder with the emulator's C++; FileNotFoundError where the package was installed without it."""
    here = Path(__file__).resolve()
    for folder in (here.parents[3] / "emulator", here.parent / "emulator"):
        if (folder / "include" / "c_api" / "asc_simd.h").is_file():
            return folder
    raise FileNotFoundError(
        "cann_ops: the emulator's C++ is missing; it is in packages/cann_ops/emulator of the checkout"
    )


def templates_dir() -> Path | None:
    """The folder with the headers that TileLang's source includes; None where TileLang is not installed."""
    import importlib.util

    found = importlib.util.find_spec("tilelang")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "src"
    return folder if (folder / "tl_templates" / "ascend" / "common.h").is_file() else None


def available() -> tuple[bool, str]:
    """Whether source can be compiled here, and why not."""
    if shutil.which("g++") is None:
        return False, "the emulator needs g++"
    try:
        emulator_dir()
    except FileNotFoundError as error:
        return False, str(error)
    return True, ""


def cache_dir() -> Path:
    """Compiled sources: CANN_OPS_EMULATE_CACHE, or a folder of this user among the temporary files."""
    given = os.environ.get("CANN_OPS_EMULATE_CACHE")
    folder = Path(given) if given else Path(tempfile.gettempdir()) / f"cann_ops_emulate_{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to someone else; set CANN_OPS_EMULATE_CACHE")
    return folder


def prune(folder: Path, days: float = 30) -> None:
    """Remove what was made more than `days` days ago: other versions of the emulator and of sources."""
    oldest = time.time() - days * 86400
    for path in (*folder.glob("runtime_*"), *folder.glob("kernel_*.so")):
        try:
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except FileNotFoundError:  # another process was first
            continue


def _digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:24]


@functools.cache
def _compiler() -> str:
    there, why = available()
    if not there:
        raise CompileError(why)
    done = subprocess.run(["g++", "-dumpfullversion", "-dumpmachine"], capture_output=True, text=True, check=True)
    return done.stdout


def _run(arguments: list[str]) -> None:
    plain = os.environ | {"LC_ALL": "C"}  # `explain` reads g++'s words in English
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False, env=plain)
    if done.returncode:
        raise CompileError(explain(done.stderr))


def explain(output: str) -> str:
    """g++'s words, with the calls that the emulator does not have first."""
    missing = sorted({name.removeprefix("::") for name in _MISSING.findall(output)})
    unsupported = sorted(set(_UNSUPPORTED.findall(output)))
    errors = [line for line in output.splitlines() if "error:" in line][:8]
    said = []
    if missing:
        said.append("the emulator does not have " + ", ".join(missing))
    said += unsupported
    return "\n".join([*said, *errors]) or output[:2000]


def _sources() -> list[Path]:
    return sorted((emulator_dir() / "src").glob("*.cpp"))


@functools.cache
def _runtime_digest() -> str:
    files = sorted(p for p in emulator_dir().rglob("*") if p.suffix in (".h", ".hpp", ".cpp"))
    texts = [f"{p.relative_to(emulator_dir())}\n{p.read_text()}" for p in files]
    return _digest(_compiler(), *_COMMON, *_KERNEL, *_RUNTIME, *texts)


@functools.cache
def runtime() -> Path:
    """A folder with the compiled runtime and the precompiled headers."""
    folder = cache_dir() / f"runtime_{_runtime_digest()}"
    if (folder / "runtime.o").is_file():
        return folder
    prune(cache_dir())
    work = Path(tempfile.mkdtemp(dir=cache_dir()))
    try:
        _compile_runtime(work)
        with contextlib.suppress(OSError):  # it is there already if another process was first
            work.replace(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not (folder / "runtime.o").is_file():
        raise CompileError(f"the compiled runtime could not be moved to {folder}")
    return folder


def _compile_runtime(work: Path) -> None:
    include = f"-I{emulator_dir() / 'include'}"
    # One unit of all sources: the headers are read once.
    unit = work / "runtime.cpp"
    unit.write_text("".join(f'#include "{path}"\n' for path in _sources()))
    (work / "prelude.hpp").write_text('#include "c_api/asc_simd.h"\n')
    header = [*_COMMON, *_KERNEL, include, "-x", "c++-header", str(work / "prelude.hpp")]
    _run([*header, "-o", str(work / "prelude.hpp.gch")])
    _run([*_COMMON, *_RUNTIME, include, f"-I{emulator_dir() / 'src'}", "-c", str(unit), "-o", str(work / "runtime.o")])


@functools.cache
def library(source: str) -> ctypes.CDLL:
    """The compiled source with the runtime, loaded. CompileError names calls that are not emulated."""
    text = translate(source)
    parts = runtime()
    templates = templates_dir()
    path = cache_dir() / f"kernel_{_digest(_runtime_digest(), str(templates), text)}.so"
    if not path.is_file():
        includes = [f"-I{emulator_dir() / 'include'}", *([f"-I{templates}"] if templates else [])]
        with tempfile.TemporaryDirectory(dir=cache_dir()) as name:
            work = Path(name)
            (work / "kernel.cpp").write_text(text)
            prelude = ["-include", str(parts / "prelude.hpp"), *includes]
            _run([*_COMMON, *_KERNEL, *prelude, "-c", str(work / "kernel.cpp"), "-o", str(work / "kernel.o")])
            objects = [str(work / "kernel.o"), str(parts / "runtime.o")]
            _run(["-shared", "-Wl,-Bsymbolic", *objects, "-o", str(work / "kernel.so")])
            (work / "kernel.so").replace(path)
    return ctypes.CDLL(str(path))
