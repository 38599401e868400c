"""The erasure code's speed, in a process of its own under the I/O process's memory settings."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.discover import ROOT
from orchestrator.cache.erasure import code
from orchestrator.cache.io.process import KEEP_BUFFERS

STRIPE = 32 * 113_920


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """`code_gbps` in a fresh process: memory settings are read when a process starts."""
    command = [sys.executable, "-m", "bench.cache.code_speed", str(repeats)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **KEEP_BUFFERS}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring the code failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def code_gbps(repeats: int = 30) -> dict[str, dict[str, float]]:
    """GB/s of stripe bytes of 10 + 2: making shards, and reading with none, one and two of the data shards lost."""
    data = os.urandom(STRIPE)
    shards = dict(enumerate(code.encode(data)))
    lost = {f"decode, {n} lost": {k: v for k, v in shards.items() if k >= n} for n in (0, 1, 2)}
    ours = {"encode": _rate(lambda: code.encode(data), repeats)}
    ours |= {name: _rate(lambda s=some: code.decode(s, STRIPE), repeats) for name, some in lost.items()}
    found = {"pyeclib, ISA-L": ours}
    try:
        import zfec
    except ImportError:
        return found
    size = code.shard_size(STRIPE)
    rows = [data[n * size : (n + 1) * size] for n in range(10)]
    encoder, decoder = zfec.Encoder(10, 12), zfec.Decoder(10, 12)
    whole = [*rows, *encoder.encode(rows, (10, 11))]
    theirs = {"encode": _rate(lambda: encoder.encode(rows, (10, 11)), repeats)}
    for n in (1, 2):  # with none lost it gives back what it was given
        numbers = [*range(n, 10), *range(10, 10 + n)]
        placed = _in_place(numbers)
        taken = [whole[k] for k in placed]
        theirs[f"decode, {n} lost"] = _rate(lambda t=taken, k=placed: decoder.decode(t, k), repeats)
    return {**found, "zfec": theirs}


def _in_place(numbers: list[int]) -> list[int]:
    """zfec wants each data shard that is there at its own place."""
    parity = [n for n in numbers if n >= 10]
    return [n if n in numbers else parity.pop(0) for n in range(10)]


def _rate(call: Callable[[], Any], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return STRIPE / statistics.median(times) / 1e9


if __name__ == "__main__":
    print(json.dumps(code_gbps(int(sys.argv[1]))))
