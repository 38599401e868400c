"""A GPU for the Python code: its kernels are the device code on host threads, its memory is the host's."""

from __future__ import annotations

import ctypes
import importlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

from ep_comm import arguments
from kernel_core.testing.child import load_file

EMULATED = load_file(Path(__file__).parent / "emulated.py")
FORMATS, OFFSETS, VALUES, run_program = EMULATED.FORMATS, EMULATED.OFFSETS, EMULATED.VALUES, EMULATED.run_program


class FakeModule:
    """`ep_comm._cuda`."""

    def __init__(self, library) -> None:
        self.library, self.seed = library, 0
        self.published = []

    def load_kernels(self) -> None:
        pass

    def Shape(self, **sizes):
        assert set(sizes.values()) & set(FORMATS.values())
        return SimpleNamespace(**sizes)

    def Region(self, shape, fixed, packed):
        sizes = (ctypes.c_int32 * 7)(*vars(shape).values())
        at = (ctypes.c_int64 * len(OFFSETS))()
        self.library.region_offsets(sizes, int(fixed), int(packed), at)
        offsets = dict(zip(OFFSETS, at, strict=True)) | {"ended": 64 + 3 * 64 * 8}
        return SimpleNamespace(offsets=lambda: offsets, sizes=sizes, forms=(fixed, packed))

    def RankArgs(self, shape, region, rank, limit):
        zeros = dict.fromkeys((*VALUES, "x_narrow", "y_narrow"), 0)
        return SimpleNamespace(region=region, rank=rank, limit=limit, peers=0, report=0, **zeros)

    def launch(self, op, ranks, ctas, stream):
        region = ranks[0].region
        regions = (ctypes.c_int64 * region.sizes[0]).from_address(ranks[0].peers)
        by_rank = {a.rank: a for a in ranks}
        ops, values, reports = [], [], []
        spare = (ctypes.c_uint8 * 64)()
        for r in range(region.sizes[0]):
            a = by_rank.get(r)
            ops.append(-1 if a is None else op)
            reports.append(ctypes.addressof(spare) if a is None else a.report)
            if a is None:
                values += [0] * len(VALUES)
                continue
            narrow = a.y_narrow if op == 3 else a.x_narrow
            values += [int(narrow if name == "narrow" else getattr(a, name)) for name in VALUES]
        self.seed += 1
        limit = ranks[0].limit // 1000
        run_program(self.library, region.sizes, region.forms, list(regions), reports, limit, ops, values,
                    min(ctas, 2), self.seed)  # fmt: skip

    def publish(self, rank, stream, **given):
        self.published.append((SimpleNamespace(**vars(rank)), given))

    def store_word(self, to, value):
        ctypes.c_uint64.from_address(to).value = value


def use(monkeypatch, library) -> FakeModule:
    """`ep_comm.cuda` on the host for one test."""
    names = ("communicator", "exchange", "sizes", "virtual")  # the last is a function of the package too
    communicator, exchange, sizes, virtual = (importlib.import_module(f"ep_comm.cuda.{name}") for name in names)
    module = FakeModule(library)
    stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=0)
    fake = SimpleNamespace(
        current_stream=lambda device=None: stream, device=lambda device: nullcontext(),
        synchronize=lambda device=None: None, is_current_stream_capturing=lambda: False,
    )  # fmt: skip
    for name, value in vars(fake).items():
        monkeypatch.setattr(torch.cuda, name, value)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    for place in (communicator, virtual):
        monkeypatch.setattr(place, "cuda_module", lambda package: module)
    monkeypatch.setattr(virtual, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(sizes, "gpu", lambda device: torch.device("cpu"))
    monkeypatch.setattr(exchange.torch.cuda, "Stream", lambda device: SimpleNamespace())
    check_dispatch, check_combine = arguments.check_dispatch, arguments.check_combine
    host = SimpleNamespace(**vars(arguments))
    host.check_dispatch = lambda s, x, i, w, device: check_dispatch(s, x, i, w, "cpu")
    host.check_combine = lambda *given: check_combine(*given[:-1], "cpu")
    monkeypatch.setattr(communicator, "arguments", host)
    return module
