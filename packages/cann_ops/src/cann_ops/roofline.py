"""Bounds of the kernels by arithmetic from documented facts of the Ascend 950. Nothing here was measured.

`python -m cann_ops.roofline` prints the table that stands in docs/kernels/cann_ops.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CORES = 32
CLOCK_GHZ = 1.65
MACS = {"bf16": 4096, "fp8": 8192, "fp4": 16384, "fp32": 256}
"""Products with a sum that a cube core does in a cycle, by the kind of its operands."""
MEMORY_GBPS = {"950PR": 1600.0, "950DT": 4000.0}


@dataclass(frozen=True)
class Work:
    """What a launch (or a chain of them) has to move and to multiply, counted from its shape.

    `read`, `written`: bytes of global memory, each byte that is needed once a launch. `macs`: of the cube, by `kind`.
    """

    op: str
    shape: str
    read: int
    written: int
    macs: int = 0
    kind: str = "bf16"

    def memory_us(self, part: str) -> float:
        """Microseconds that the bytes take at the memory's bandwidth."""
        return (self.read + self.written) / MEMORY_GBPS[part] / 1e3

    def cube_us(self) -> float:
        """Microseconds that the products take on all cube cores without a gap."""
        return self.macs / (MACS[self.kind] * CORES * CLOCK_GHZ) / 1e3


def rows(op: str, shape: str, count: int, read: int, written: int) -> Work:
    """Work that is the same for each row."""
    return Work(op, shape, count * read, count * written)


def attention(tokens: int, heads: int, window: int, selected: int) -> Work:
    """Rows of 528 and 288 bytes, lists of places, q and the result in bfloat16; two products of 512 a head and key."""
    keys = window + selected
    read = window * 528 + selected * 288 + keys * 4 + heads * 512 * 2
    shape = f"{tokens} rows, {heads} heads, {window} + {selected} keys"
    op = "sparse_attention" if selected else "window_attention"
    return Work(op, shape, tokens * read, tokens * heads * 1024, tokens * heads * keys * 512 * 2)


def index_scores(tokens: int, keys: int, heads: int = 32) -> Work:
    """68 bytes a key and row of queries, as every row fetches its own keys; a float32 score written."""
    shape = f"{tokens} rows, {keys} keys, {heads} heads"
    return Work("index_scores", shape, tokens * keys * 68, tokens * keys * 4, tokens * keys * heads * 128, "fp4")


def select_top(tokens: int, width: int) -> Work:
    """18 passes over the scores: 16 of two bits, the count above the bound, the choice."""
    return Work("select_top", f"{tokens} rows of {width}", 18 * tokens * width * 4, tokens * 512 * 4)


def product(experts: int, tokens: int, columns: int, depth: int) -> Work:
    """Codes and scales of all weights once, activations once, float32 results."""
    weights = experts * columns * (depth // 2 + depth // 32)
    inputs = experts * tokens * (depth + depth // 32)
    shape = f"{experts} experts, {tokens} rows each, {columns} x {depth}"
    macs = experts * tokens * columns * depth
    return Work("mx_linear", shape, weights + inputs, experts * tokens * columns * 4, macs, "fp8")


def hc_step(tokens: int, d: int) -> Work:
    """Streams read by the update, written, and read again by the products; y, the mix; the matrix once a tile of 32."""
    read = tokens * (2 * 4 * d + d + 44) * 4 + -(-tokens // 32) * 32 * 4 * d * 4
    macs = tokens * 32 * 4 * d
    return Work("hc_step", f"{tokens} rows, d {d}", read, tokens * (5 * d + 24) * 4, macs, "fp32")


def table() -> Iterator[Work]:
    """The shapes of the table: a decode step of 128 rows, a prefill of 4,096."""
    yield rows("kv_rows", "4096 rows, main", 4096, 2048 + 256, 288)
    yield rows("kv_rows", "4096 rows, window", 4096, 2048 + 256, 528)
    yield rows("norm_quantize", "4096 rows, 5120", 4096, 5120 * 4, 5120 + 160)
    yield rows("swiglu_quantize", "4096 rows, 2304", 4096, 2 * 2304 * 4 + 4, 2304 + 72)
    yield rows("store_main", "4096 rows", 4096, 288 + 4, 288)
    yield rows("route", "4096 rows, 384 experts, 6", 4096, 384 * 4, 48)
    yield attention(128, 64, 128, 512)
    yield attention(128, 64, 128, 0)
    yield index_scores(64, 65536)
    yield select_top(128, 65536)
    yield product(7, 8, 4608, 5120)
    yield product(48, 128, 4608, 5120)
    yield hc_step(4096, 5120)


def markdown() -> str:
    """The table as text."""
    lines = [
        "| op | shape | MB moved | memory, 950PR | memory, 950DT | cube |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for work in table():
        moved = (work.read + work.written) / 1e6
        times = [f"{work.memory_us(part):.1f} us" for part in MEMORY_GBPS]
        cube = f"{work.cube_us():.1f} us {work.kind}" if work.macs else "-"
        lines.append(f"| `{work.op}` | {work.shape} | {moved:.1f} | {times[0]} | {times[1]} | {cube} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
