"""`fathom bench ep`: starts a process a GPU, and writes what rank 0 measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench import ledger, report
from bench.discover import ROOT
from bench.ep.group import MARK
from bench.ep.rows import ledger_file
from bench.ep.worker import PARTS
from kernel_core.bench import append_row, device_ledger

ENGINE = "engine"
# NVLink multicast stays off: a program that uses it can stop the GPUs of a host that others share.
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def run(console: Console, gpus: int, parts: list[str], quick: bool, out: Path | None) -> int:
    """Exit status: 0 when every rank ended well. ValueError for what this machine does not have."""
    wrong = sorted(set(parts) - {*PARTS, ENGINE})
    if wrong or not parts:
        raise ValueError(f"parts: got {', '.join(wrong) or 'none'}, allowed are {', '.join((*PARTS, ENGINE))}")
    found = torch.cuda.device_count()
    if gpus < 2:
        raise ValueError(f"gpus: got {gpus}, allowed are 2 or more; `fathom bench ep_comm --device cuda` takes one GPU")
    if found < gpus:
        raise ValueError(f"gpus: got {gpus}, allowed are at most the {found} NVIDIA GPUs of this host")
    if out is None and not quick:
        out = ledger_file(ledger.RESULTS, device_ledger(torch.cuda.get_device_name()), gpus)
    console.print(topology(), markup=False, highlight=False)
    rows: list[ledger.Row] = []
    status = 0
    for message in chain(_messages(gpus, [p for p in parts if p != ENGINE], quick), _engine(gpus, parts, quick)):
        if "say" in message:
            console.print(message["say"], markup=False, highlight=False)
        elif "row" in message:
            rows.append(message["row"])
            report.line(console, message["row"])
            if out is not None:
                append_row(out, message["row"])
        else:
            status = 1
            console.print(message["failed"], style="red", markup=False, highlight=False)
    written = f"{len(rows)} rows added to {out}" if out is not None else "not written"
    console.print(written, highlight=False)
    return status


def _engine(gpus: int, parts: list[str], quick: bool) -> Iterator[dict[str, Any]]:
    """The engine's processes are started by its own supervisor."""
    if ENGINE not in parts:
        return
    from bench.ep import engine_rows

    os.environ |= QUIET
    said: list[dict[str, Any]] = []
    try:
        for row in engine_rows.rows(gpus, quick, lambda text: said.append({"say": text})):
            yield from said
            said.clear()
            yield {"row": row}
    except (ArithmeticError, RuntimeError) as error:
        yield from said
        yield {"failed": f"{type(error).__name__}: {error}"}


def topology() -> str:
    """How the GPUs of this host are linked, in nvidia-smi's words; empty where it cannot say."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith(("\t", "GPU", "\x1b")))


def _messages(gpus: int, parts: list[str], quick: bool) -> Iterator[dict[str, Any]]:
    """What the processes say, as it comes. A rank that fails ends the others."""
    if not parts:
        return
    command = [sys.executable, "-u", "-m", "bench.ep.worker"]
    rest = [_free_place(), "--parts", ",".join(parts), *(["--quick"] if quick else [])]
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(places)}
    ranks = [
        subprocess.Popen(
            [*command, str(r), str(gpus), *rest], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for r in range(gpus)
    ]  # fmt: skip
    errors = [_Tail(rank.stderr) for rank in ranks]
    first = ranks[0].stdout
    assert first is not None
    try:
        watch = threading.Thread(target=_end_together, args=(ranks,), daemon=True)
        watch.start()
        for line in first:
            if line.startswith(MARK):
                yield json.loads(line[len(MARK) :])
        watch.join()
        for r, rank in enumerate(ranks):
            if rank.returncode:
                yield {"failed": f"rank {r} ended with {rank.returncode}: {errors[r].text()}"}
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


def _free_place() -> str:
    """A host and port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def _end_together(ranks: list[subprocess.Popen[str]]) -> None:
    """Wait for all; once one has failed the others get some seconds to notice."""
    waiting = set(ranks)
    patience = 1e9
    while waiting and patience > 0:
        for rank in list(waiting):
            try:
                code = rank.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                patience -= 0.2
                continue
            waiting.discard(rank)
            if code:
                patience = min(patience, 20.0)
    for rank in waiting:
        rank.kill()
        rank.wait()


class _Tail:
    """The end of a stream, read as it comes so that nobody waits for room in it."""

    def __init__(self, stream: Any, lines: int = 30) -> None:
        self._lines: deque[str] = deque(maxlen=lines)
        self._thread = threading.Thread(target=lambda: self._lines.extend(stream), daemon=True)
        self._thread.start()

    def text(self) -> str:
        self._thread.join(timeout=5)
        return "".join(self._lines)
