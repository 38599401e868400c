"""What packed rows can gain in sparse attention, as arithmetic: bytes over bandwidth, operations over tensor rate.

A decode row reads its own keys and nothing shared, so one query's bytes and operations say which of the two binds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench import format
from bench.ledger import Row

DIM, WINDOW, SELECTED = 512, 128, 512
HEADS = (8, 16, 32, 64, 128)
BATCH = 128
# bytes of a window row and of a selected row
PACKED, FP8_ROWS, BF16_ROWS = (528, 288), (584, 584), (1024, 1024)


@dataclass(frozen=True)
class Rates:
    """A device's measured ceilings: a copy in GB/s, a bfloat16 product in TFLOP/s."""

    gbps: float
    tflops: float
    source: str


# One H200, PyTorch 2.11: a copy of 1 GiB and a product of 8192 x 8192 x 8192 on random data.
H200 = Rates(4284, 798, "one H200's copy and bfloat16 product in PyTorch 2.11")


def rates(rows: Sequence[Row]) -> Rates:
    """Medians of a ledger's ceilings; `H200` where no row has both."""
    seen = [row["ceilings"] for row in rows]
    seen = [c for c in seen if c.get("copy_gbps") and c.get("bf16_tflops")]
    if not seen:
        return H200
    return Rates(median(c["copy_gbps"] for c in seen), median(c["bf16_tflops"] for c in seen), "the ledger's ceilings")


def byte_us(heads: int, row_bytes: tuple[int, int], device: Rates, batch: int = BATCH) -> float:
    """Keys in, query in and result out in bfloat16, over the bandwidth."""
    keys = WINDOW * row_bytes[0] + SELECTED * row_bytes[1]
    return batch * (keys + 2 * heads * DIM * 2) / device.gbps / 1e3


def tensor_us(heads: int, device: Rates, batch: int = BATCH) -> float:
    """Two products of 640 keys with every head, over the tensor rate."""
    return batch * 4 * heads * DIM * (WINDOW + SELECTED) / device.tflops / 1e6


def table(ledgers: Mapping[str, Sequence[Row]]) -> str:
    """Markdown: for each number of heads the two bounds, what binds, and the gain over wider rows."""
    device = rates(ledgers.get("h200", ()))
    head = ("heads", "tensor", "bytes, packed", "bytes, 584 B rows", "bytes, bf16 rows", "binds", "gain over 584 B")
    lines = ["| " + " | ".join(head) + " |", "|---:|---:|---:|---:|---:|---|---:|"]
    for heads in HEADS:
        tensor = tensor_us(heads, device)
        packed, wider, whole = (byte_us(heads, rows, device) for rows in (PACKED, FP8_ROWS, BF16_ROWS))
        cells = (
            str(heads),
            *(format.duration(us) for us in (tensor, packed, wider, whole)),
            "bytes" if packed > tensor else "tensor cores",
            format.ratio(max(tensor, wider) / max(tensor, packed)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    taken = f"{device.gbps:.0f} GB/s and {device.tflops:.0f} TFLOP/s: {device.source}."
    return "\n".join(lines) + f"\n\nBatch {BATCH}, {WINDOW} + {SELECTED} keys; {taken}\n"
