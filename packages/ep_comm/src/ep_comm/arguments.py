"""Checks of what callers pass in, the same on every transport. They run before an epoch is used up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_comm.results import Dispatched, Transfer
from ep_comm.shape import Shape
from kernel_core.check import require, tensor

MOST_GATHERED = 65536
MOST_TAG = 2**62
_VALUES = (torch.float32, torch.bfloat16)


def check_dispatch(
    shape: Shape, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, device: str = "cpu"
) -> None:
    """Types, sizes and places of a dispatch's arguments; ids within -1 to physical_experts - 1 (on the CPU only)."""
    tensor("x", x, dtype=_VALUES, shape=(None, shape.hidden))
    tokens = x.shape[0]
    require(tokens <= shape.max_tokens, "x", f"{tokens} tokens", f"at most max_tokens = {shape.max_tokens}")
    tensor("ids", ids, dtype=torch.int32, shape=(tokens, shape.top_k))
    tensor("weights", weights, dtype=torch.float32, shape=(tokens, shape.top_k))
    for name, value in (("x", x), ("ids", ids), ("weights", weights)):
        require(value.device.type == device, name, f"device {value.device}", device)
    if tokens and device == "cpu":
        low, high = (int(bound) for bound in ids.aminmax())
        require(
            low >= -1 and high < shape.physical_experts,
            "ids",
            f"values from {low} to {high}",
            f"-1 to {shape.physical_experts - 1}",
        )


def check_combine(
    shape: Shape,
    y: torch.Tensor,
    dispatched: Dispatched,
    out: torch.Tensor | None,
    tokens: int,
    latest: int,
    device: str = "cpu",
) -> bool:
    """Checks a combine's arguments; whether `y` has a row a slot. `latest` is the epoch of the last dispatch."""
    require(latest > 0, "dispatched", "one without a dispatch of this communicator", "the latest dispatch's")
    require(dispatched.epoch == latest, "dispatched", f"epoch {dispatched.epoch}", f"the latest dispatch's, {latest}")
    rows = dispatched.ids.shape[0]
    slots = y.ndim == 3
    tensor("y", y, dtype=_VALUES, shape=(rows, shape.top_k, shape.hidden) if slots else (rows, shape.hidden))
    require(y.device.type == device, "y", f"device {y.device}", device)
    if out is not None:
        tensor("out", out, dtype=torch.float32, shape=(tokens, shape.hidden))
        require(out.device.type == device, "out", f"device {out.device}", device)
    return slots


def check_row(row: torch.Tensor) -> None:
    tensor("row", row, dtype=torch.int64, shape=(None,))
    require(row.device.type == "cpu", "row", f"device {row.device}", "a tensor on the host")
    require(1 <= row.numel() <= MOST_GATHERED, "row", f"{row.numel()} values", f"1 to {MOST_GATHERED}")


def check_transfers(
    shape: Shape, rank: int, transfers: Sequence[Transfer], under_way: set[tuple[int, int, int]]
) -> None:
    """Each concerns this rank; (tag, source, target) is new among `under_way` and the list itself."""
    seen = set(under_way)
    for transfer in transfers:
        tag, source, target = transfer.tag, transfer.source, transfer.target
        require(0 <= tag < MOST_TAG, "tag", tag, f"0 to {MOST_TAG - 1}")
        for name, value in (("source", source), ("target", target)):
            require(0 <= value < shape.ranks, name, value, f"0 to {shape.ranks - 1}")
        require(rank in (source, target), "transfers", f"one from {source} to {target}", f"those of rank {rank}")
        require(source != target or shape.ranks == 1, "transfers", f"one from {source} to itself", "two ranks")
        tensor("buffer", transfer.buffer, dtype=torch.uint8, shape=(None,))
        require((tag, source, target) not in seen, "tag", f"{tag} twice", "one that is not under way")
        seen.add((tag, source, target))
