"""Dispatch and combine between two processes of one host, beside a plain copy of the bytes that one rank receives."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from shared_peer import IDLE, inputs, results, shape_of

import ep_comm
from ep_comm import Communicator, reference
from kernel_core.bench import Bench, Case, Problem


def _start(tokens: int, op: str) -> Communicator:
    path = Path(tempfile.mkdtemp(prefix="ep_comm")) / "region"
    subprocess.Popen([sys.executable, Path(__file__).with_name("shared_peer.py"), path, str(tokens), op])
    comm = ep_comm.shared_memory(path, 0, shape_of(tokens), timeout=IDLE)
    path.parent.rmdir()
    return comm  # the peer ends when it is closed


def _copy(count: int) -> Callable[[], object]:
    source, target = torch.ones(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
    return lambda: target.copy_(source)


def _dispatch(tokens: int) -> Problem:
    shape = shape_of(tokens)
    all_inputs = [inputs(shape, rank) for rank in range(2)]
    comm = _start(tokens, "dispatch")
    received = comm.dispatch(*all_inputs[0]).ids.shape[0]

    def check() -> None:
        got = comm.dispatch(*all_inputs[0])
        xs, ids, weights = (list(column) for column in zip(*all_inputs, strict=True))
        want = reference.dispatch(shape, xs, ids, weights)[0]
        if not (torch.equal(got.x.float(), want.x.float()) and torch.equal(got.ids, want.ids)):
            raise ArithmeticError("rows differ from the reference")

    rows = received * (shape.token_bytes + 8 * shape.top_k)
    return Problem(
        lambda: comm.dispatch(*all_inputs[0]),
        _copy(rows),
        2 * shape.hidden * tokens + rows,
        0,
        check=check,
        note="reference: a copy of the rows that arrive",
    )


def _combine(tokens: int) -> Problem:
    shape = shape_of(tokens)
    comm = _start(tokens, "combine")
    got = comm.dispatch(*inputs(shape, 0))
    y = results(shape, got)

    def check() -> None:
        if not (comm.combine(y, got) == shape.top_k).all():
            raise ArithmeticError("sums differ from the number of slots")

    home = tokens * shape.top_k * 2 * shape.hidden
    return Problem(
        lambda: comm.combine(y, got),
        _copy(home),
        2 * home + 4 * shape.hidden * tokens,
        0,
        check=check,
        note="reference: a copy of the results that come home",
    )


BENCHES = [
    Bench(
        f"ep_comm.{op}",
        [Case(f"ep_{op}_shm_2x{n}", {"ranks": 2, "tokens": n, "hidden": 5120, "top_k": 6}, functools.partial(make, n))
         for n in (1, 128, 1024)],
        ("csrc/cpu/*", "csrc/bindings.cpp", "csrc/include/**/*", "src/ep_comm/*.py"),
    )
    for op, make in (("dispatch", _dispatch), ("combine", _combine))
]  # fmt: skip
