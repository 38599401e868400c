"""Ranks whose collectives are the device code on host threads."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ep_comm import Dispatched, Shape
from kernel_core.testing.host import host_library

HERE = Path(__file__).parent
THREADS = HERE.parents[1] / "mega_moe" / "tests" / "host"

FORMATS = {"float32": 0, "bfloat16": 1, "fp8": 2}
PUSH, ANNOUNCE, COLLECT, COMBINE, BARRIER, SNAPSHOT = range(6)
OFFSETS = ("sent_ids", "x", "scales", "ids", "weights", "sources", "records", "lists", "results", "bytes")
VALUES = ("tokens", "x", "ids", "weights", "counts", "host_counts", "rows_x", "rows_scales", "rows_ids",
          "rows_weights", "rows_sources", "y", "out", "narrow", "fixed", "form")  # fmt: skip


class Report(ctypes.Structure):
    _fields_ = [
        ("state", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("epoch", ctypes.c_uint64),
        ("missing", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
    ]


def run_program(library, sizes, forms, regions, reports, limit, ops, values, ctas, seed) -> None:
    """`run_program` of the host library; an AssertionError says what went wrong in the emulation."""
    error = ctypes.create_string_buffer(400)
    ranks = len(regions)
    library.run_program(
        sizes, *map(int, forms), (ctypes.c_void_p * ranks)(*regions), (ctypes.c_void_p * ranks)(*reports),
        ctypes.c_uint64(limit), len(ops) // ranks, (ctypes.c_int32 * len(ops))(*ops),
        (ctypes.c_int64 * len(values))(*values), ctas, ctypes.c_uint64(seed), error,
    )  # fmt: skip
    assert not error.value, error.value.decode()


@dataclass
class Emulated:
    """All ranks of a shape. `ctas` a rank; `seed` chooses the schedule and grows with each call."""

    library: ctypes.CDLL
    shape: Shape
    ctas: int = 2
    seed: int = 0
    limit: int = 10**7
    absent: tuple[int, ...] = ()
    regions: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.shape
        sizes = (s.ranks, s.max_tokens, s.hidden, s.top_k, s.experts, FORMATS[s.dispatch], FORMATS[s.combine])
        self.sizes = (ctypes.c_int32 * 7)(*sizes)
        offsets = (ctypes.c_int64 * len(OFFSETS))()
        self.library.region_offsets(self.sizes, 1, 1, offsets)
        self.at = dict(zip(OFFSETS, offsets, strict=True))
        for _ in range(s.ranks):
            memory = torch.full((self.at["bytes"] + 256,), 0xA5, dtype=torch.uint8)
            skip = -memory.data_ptr() % 128
            memory[skip : skip + self.at["sent_ids"]] = 0
            self.regions.append(memory[skip : skip + self.at["bytes"] + 64])
        self.reports = (Report * s.ranks)()

    def program(self, steps: Sequence[tuple[int | Sequence[int], Sequence[dict]]]) -> None:
        """One launch: each rank goes through all steps (ops and a rank's values) on its own."""
        ranks = range(self.shape.ranks)
        ops: list[int] = []
        flat: list[int] = []
        for op, values in steps:
            chosen = [op] * len(ranks) if isinstance(op, int) else list(op)
            ops += [-1 if r in self.absent else chosen[r] for r in ranks]
            for of_rank in values:
                for name in VALUES:
                    value = of_rank.get(name, 0)
                    flat.append(value.data_ptr() if isinstance(value, torch.Tensor) else int(value))
        size = ctypes.sizeof(Report)
        reports = [ctypes.addressof(self.reports) + r * size for r in ranks]
        self.seed += 1
        run_program(
            self.library, self.sizes, (1, 1), [m.data_ptr() for m in self.regions], reports, self.limit, ops, flat,
            self.ctas, self.seed,
        )  # fmt: skip

    def call(self, ops: int | Sequence[int], values: Sequence[dict], *, narrow=False, fixed=False, form=0) -> None:
        self.program([(ops, [v | {"narrow": narrow, "fixed": fixed, "form": form} for v in values])])

    def dispatch(self, xs, ids, weights, *, fixed: bool) -> list[Dispatched]:
        s = self.shape
        self.sent = [x.shape[0] for x in xs]
        counts = [torch.full((s.ranks,), -7, dtype=torch.int32) for _ in xs]
        values = [
            {"tokens": x.shape[0], "x": x, "ids": i, "weights": w, "counts": c}
            for x, i, w, c in zip(xs, ids, weights, counts, strict=True)
        ]
        narrow = xs[0].dtype == torch.bfloat16
        self.call(PUSH if fixed else ANNOUNCE, values, narrow=narrow)
        if fixed:
            made = [self._fixed(r) for r in range(s.ranks)]
        else:
            made = [self._empty(int(c.sum())) for c in counts]
            for of_rank, rows in zip(values, made, strict=True):
                of_rank |= dict(zip(("rows_x", "rows_scales", "rows_ids", "rows_weights", "rows_sources"), rows,
                                    strict=True))  # fmt: skip
            self.call(COLLECT, values)
        return [
            Dispatched(x, sc if s.dispatch == "fp8" else None, i, w, c, so, fixed, 1)
            for (x, sc, i, w, so), c in zip(made, counts, strict=True)
        ]

    def combine(self, ys, dispatched) -> list[torch.Tensor]:
        s = self.shape
        outs = [torch.full((t, s.hidden), float("nan")) for t in self.sent]
        values = [
            {"tokens": o.shape[0], "y": y, "out": o, "counts": d.counts, "rows_ids": d.ids, "rows_sources": d.sources}
            for y, d, o in zip(ys, dispatched, outs, strict=True)
        ]
        form = 0 if ys[0].ndim == 3 else 1
        self.call(COMBINE, values, narrow=ys[0].dtype == torch.bfloat16, fixed=dispatched[0].fixed, form=form)
        return outs

    def barrier(self) -> None:
        self.call(BARRIER, [{} for _ in range(self.shape.ranks)])

    def _fixed(self, rank: int) -> tuple[torch.Tensor, ...]:
        s, at, memory = self.shape, self.at, self.regions[rank]
        rows, groups = s.ranks * s.max_tokens, s.hidden // 128 if s.dispatch == "fp8" else 0

        def view(name: str, dtype: torch.dtype, width: int) -> torch.Tensor:
            size = rows * width * dtype.itemsize
            return memory[at[name] : at[name] + size].view(dtype).view(rows, width)

        return (
            view("x", s.dispatch_dtype, s.hidden),
            view("scales", torch.float32, groups),
            view("ids", torch.int32, s.top_k),
            view("weights", torch.float32, s.top_k),
            view("sources", torch.int32, 1).flatten(),
        )

    def _empty(self, rows: int) -> tuple[torch.Tensor, ...]:
        s = self.shape
        groups = s.hidden // 128 if s.dispatch == "fp8" else 0
        return (
            torch.full((rows * s.hidden * s.dispatch_dtype.itemsize,), 0x7F, dtype=torch.uint8)
            .view(s.dispatch_dtype)
            .view(rows, s.hidden),
            torch.full((rows, groups), float("nan")),
            torch.full((rows, s.top_k), -99, dtype=torch.int32),
            torch.full((rows, s.top_k), float("nan")),
            torch.full((rows,), -99, dtype=torch.int32),
        )


def device_code(folder: Path) -> ctypes.CDLL:
    """The device code, compiled for the host; skips the test outside of a checkout."""
    if not (THREADS / "device_threads.hpp").is_file():
        pytest.skip("needs the checkout: CTAs on a host thread stand in mega_moe's tests")
    source = HERE / "host/collectives_threads.cpp"
    library = host_library(source, folder, HERE.parent / "csrc", THREADS, THREADS / "stub")
    library.run_program.restype = library.region_offsets.restype = None
    return library


def inputs(shape: Shape, tokens: list[int], seed: int, *, kind="random", dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    xs = [(3 * torch.randn(t, shape.hidden, generator=g)).to(dtype) for t in tokens]
    ids = [torch.randint(-1, shape.physical_experts, (t, shape.top_k), generator=g, dtype=torch.int32) for t in tokens]
    for i in ids:
        if kind == "none":
            i.fill_(-1)
        elif kind == "one":
            i[:, 0] = shape.physical_experts - 1
            i[:, 1:] = -1
    weights = [torch.rand(t, shape.top_k, generator=g) for t in tokens]
    return xs, ids, weights


def assert_rows(shape: Shape, got, expected) -> None:
    for d, e in zip(got, expected, strict=True):
        assert torch.equal(d.counts, e.counts) and torch.equal(d.sources, e.sources) and torch.equal(d.ids, e.ids)
        used = e.sources >= 0
        assert torch.equal(d.x[used].view(torch.uint8), e.x[used].view(torch.uint8))
        assert torch.equal(d.weights[d.ids >= 0], e.weights[e.ids >= 0])
        if e.scales is not None:
            assert torch.equal(d.scales[used], e.scales[used])
