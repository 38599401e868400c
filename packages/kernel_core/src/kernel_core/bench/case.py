"""What a benchmark file says about an op: its cases, and for each one what to run and what it must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peer:
    """Another implementation of the same problem, timed in the same run."""

    name: str
    version: str
    run: Callable[[], object]


@dataclass(frozen=True)
class Offer:
    """A peer that may be missing: `make()` imports it, builds its inputs, checks it and returns one call.

    What it raises leaves the peer out of the row, and the row's note says why. `distribution` is the installed package
    whose version the row keeps; "" for the project's own code.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    distribution: str = ""


@dataclass(frozen=True)
class Problem:
    """One prepared case: tensors are allocated, `native()` is one call.

    `bytes` and `flops` are what the problem demands at least, not what an implementation happens to do: every
    operand read once, every result written once. They make the bound. `compute` names the ceiling for `flops`:
    "f32" (multiply-adds in float32), "bf16" or "fp8" (matrix units). `check` runs once before timing and raises when
    the result is wrong. `cold` evicts the caches before every call. `path` names the ceiling for `bytes`: "memory", or
    "h2d" for the link from the host to a GPU.
    """

    native: Callable[[], object]
    reference: Callable[[], object] | None
    bytes: int
    flops: int
    peers: Sequence[Peer | Offer] = ()
    check: Callable[[], object] | None = None
    compute: str = "f32"
    cold: bool = False
    path: str = "memory"
    note: str = ""

    def __post_init__(self) -> None:
        if self.compute not in ("f32", "bf16", "fp8"):
            raise ValueError(f"compute: got {self.compute!r}, allowed are 'f32', 'bf16' and 'fp8'")
        if self.path not in ("memory", "h2d"):
            raise ValueError(f"path: got {self.path!r}, allowed are 'memory' and 'h2d'")


@dataclass(frozen=True)
class Case:
    """A point of the ledger: its name, its shape, and how to build it (only when it is run)."""

    point: str
    shape: Mapping[str, object]
    make: Callable[[], Problem]


@dataclass(frozen=True)
class Bench:
    """An op and its cases. `sources` are globs below the package folder: a row is stale when one of them changed.

    `device` is "cpu" or "cuda": where the tensors of its cases are, and how calls are timed.
    """

    op: str
    cases: Sequence[Case]
    sources: Sequence[str] = field(default=("csrc/**/*", "src/**/*.py", "CMakeLists.txt"))
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device: got {self.device!r}, allowed are 'cpu' and 'cuda'")
