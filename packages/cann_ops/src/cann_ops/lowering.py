"""TileLang programs to AscendC text, without a device and without CANN. Needs tilelang.

TileLang sorts a kernel's parameters by name, and a dynamic size becomes a parameter of its own; what a caller has to
pass in which order is read back from the text and from the program.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from cann_ops.errors import NotLoweredError
from cann_ops.kernels import Kernel

_KERNEL = re.compile(r'extern "C" __global__ (__\w+__(?:\(\d, ?\d\))?) void (\w+)\(([^)]*)\)')
_ALLOCATED = re.compile(r'= T\.alloc_buffer\(\(((?:T\.int64\(\d+\)|\d+|,| )+)\)(?:, "(\w+)")?[^\n]*scope="([\w.]+)"')
TILELANG = "0.1.15"  # the version that everything here was tried with
_SHARED = ("cores", "quantise")  # files that programs import
_FORM = 1  # of what is kept; another number makes everything lowered again
_MEMORIES = {"shared.l1": "L1", "shared.l0a": "L0A", "shared.l0b": "L0B", "shared.l0c": "L0C"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: `kind` is its C type without the address space, e.g. "float" or "int32_t"."""

    name: str
    kind: str
    pointer: bool


@dataclass(frozen=True)
class Lowered:
    """A kernel as AscendC text.

    Attributes:
        kernel: what was lowered.
        source: the text, as TileLang wrote it.
        name: of the function in it.
        core: "__vector__", "__cube__" or "__mix__(1, 2)": which cores a block has.
        grid: blocks of the launch.
        unified_bytes: bytes of the unified buffer that a block uses.
        parameters: in the order of the function.
        sizes: for each scalar parameter the tensor and axis it is the size of.
        memory: bytes that the program holds in each on-chip memory: "UB", "L1", "L0A", "L0B", "L0C".
    """

    kernel: Kernel
    source: str
    name: str
    core: str
    grid: int
    unified_bytes: int
    parameters: tuple[Parameter, ...]
    sizes: dict[str, tuple[str, int]]
    memory: dict[str, int]


def available() -> tuple[bool, str]:
    """Whether programs can be lowered here, and why not."""
    try:
        import tilelang  # noqa: F401
    except ImportError as error:
        return False, f"TileLang is not installed ({error}); pip install 'cann_ops[lower]'"
    try:
        _target()
    except (ValueError, RuntimeError) as error:
        return False, f"this TileLang has no Ascend backend ({error}); the one tried is tilelang 0.1.15"
    return True, ""


def _target() -> Any:
    from tilelang.backend.target import determine_target

    return determine_target("ascend", return_object=True)


@cache
def lower(kernel: Kernel) -> Lowered:
    """The AscendC of a kernel; the same text every time for one version of TileLang.

    Takes seconds, some kernels tens of them, so the result is kept in `cache_folder()`, by the digest of the program. A
    machine with that folder needs no TileLang.
    Raises NotLoweredError if TileLang is missing or refuses the program, ValueError for sizes the program refuses.
    """
    kept = cache_folder() / f"{_digest(kernel)}.json"
    if kept.is_file():
        return _restore(kernel, json.loads(kept.read_text(encoding="utf-8")))
    there, why = available()
    if not there:
        raise NotLoweredError(f"{kernel}: {why}")
    lowered = lower_afresh(kernel)
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(lowered) | {"kernel": str(kernel)}), encoding="utf-8")
    part.replace(kept)
    return lowered


def lower_afresh(kernel: Kernel) -> Lowered:
    """`lower` without looking at what was lowered before."""
    import tilelang
    from tilelang import tvm

    target = _target()
    with target:
        program = kernel.program()
    try:
        with tvm.transform.PassContext(opt_level=3, config=kernel.pass_configs()), target:
            done = tilelang.lower(program, target=target, enable_host_codegen=False, enable_device_compile=False)
    except Exception as error:
        raise NotLoweredError(f"{kernel}: TileLang {tilelang.__version__} refused it: {error}") from error
    return _read(kernel, program, done)


def cache_folder() -> Path:
    """Lowered kernels: CANN_OPS_CACHE, or a folder of this user among the temporary files."""
    given = os.environ.get("CANN_OPS_CACHE")
    folder = Path(given) if given else Path(tempfile.gettempdir()) / f"cann_ops_{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to someone else; set CANN_OPS_CACHE")
    return folder


def _digest(kernel: Kernel) -> str:
    """Of the kernel, its program's file and those that programs share, and TileLang's version (else the one tried)."""
    try:
        version = metadata.version("tilelang")
    except metadata.PackageNotFoundError:
        version = TILELANG
    total = hashlib.sha256(f"{_FORM} {kernel} {version}".encode())
    for name in (kernel.module, *_SHARED):
        total.update((Path(__file__).parent / "tile" / f"{name}.py").read_bytes())
    return total.hexdigest()[:32]


def _restore(kernel: Kernel, kept: dict[str, Any]) -> Lowered:
    parameters = tuple(Parameter(**one) for one in kept["parameters"])
    sizes = {name: (str(tensor), int(axis)) for name, (tensor, axis) in kept["sizes"].items()}
    return Lowered(**(kept | {"kernel": kernel, "parameters": parameters, "sizes": sizes}))


def _read(kernel: Kernel, program: Any, done: Any) -> Lowered:
    source = str(done.kernel_source)
    found = _KERNEL.findall(source)
    if len(found) != 1:
        raise NotLoweredError(f"{kernel}: the text has {len(found)} kernels, allowed is 1")
    core, name, listed = found[0]
    parameters = tuple(_parameter(p.strip()) for p in listed.split(",") if p.strip())
    attributes = done.device_mod[name].attrs
    pointers = {p.name for p in parameters if p.pointer}
    sizes: dict[str, tuple[str, int]] = {}
    for variable in program.params:
        if variable in program.buffer_map and str(program.buffer_map[variable].name) in pointers:
            buffer = program.buffer_map[variable]
            for axis, size in enumerate(buffer.shape):
                if hasattr(size, "name"):
                    sizes.setdefault(str(size.name), (str(buffer.name), axis))
    shared = int(attributes["dyn_shared_memory_buf"]) if "dyn_shared_memory_buf" in attributes else 0
    grid = int(attributes["thread_extent"]["blockIdx.x"])
    memory = _memory(done.device_mod.script()) | {"UB": shared}
    return Lowered(kernel, source, name, core, grid, shared, parameters, sizes, memory)


def _memory(script: str) -> dict[str, int]:
    """Bytes of the buffers of each memory, as the lowered program allocates them, copies for overlap included."""
    used: dict[str, int] = {}
    for shape, dtype, scope in _ALLOCATED.findall(script):
        memory = _MEMORIES.get(scope.removesuffix(".dyn"))
        if memory is not None:
            count = math.prod(int(size) for size in re.findall(r"\d+", shape.replace("T.int64", "")))
            bits = int(re.findall(r"\d+", dtype)[0]) if dtype else 32  # float32 where nothing is said
            used[memory] = used.get(memory, 0) + count * bits // 8
    return used


def _parameter(text: str) -> Parameter:
    name = text.split()[-1].lstrip("*")
    kind = text[: text.rindex(name)]
    for word in ("__gm__", "__restrict__", "const"):
        kind = kind.replace(word, "")
    return Parameter(name, kind.replace("*", "").strip(), "*" in text)
