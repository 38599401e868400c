"""Comparing a kernel with its reference: several metrics, since one scalar hides a bad row, and the worst place."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Metrics:
    """How far two tensors are apart; NaN and infinities are compared by place and kept out of the numbers."""

    max_abs: float
    max_rel: float
    calc_diff: float
    worst_row: float
    worst: tuple[int, ...]
    special_mismatch: int

    def __str__(self) -> str:
        return (
            f"max abs {self.max_abs:.3e} at {list(self.worst)}, max rel {self.max_rel:.3e}, "
            f"calc_diff {self.calc_diff:.3e}, worst row calc_diff {self.worst_row:.3e}, "
            f"NaN or infinity misplaced: {self.special_mismatch}"
        )


def calc_diff(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """1 - 2 sum(xy) / sum(x^2 + y^2) in float64: 0 for equal tensors, 2 for opposite ones."""
    x, y = actual.double(), expected.double()
    norm = (x * x + y * y).sum().item()
    return 0.0 if norm == 0 else 1 - 2 * (x * y).sum().item() / norm


def row_max(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """`calc_diff` of every row (last dimension), float64[...]; a row of zeros on both sides gives 0."""
    x, y = actual.double(), expected.double()
    norm = (x * x + y * y).sum(-1)
    return torch.where(norm == 0, torch.zeros_like(norm), 1 - 2 * (x * y).sum(-1) / norm)


def compare(actual: torch.Tensor, expected: torch.Tensor) -> Metrics:
    """The metrics of two tensors of one shape."""
    x, y = actual.double(), expected.double()
    same_special = (x == y) | (x.isnan() & y.isnan())
    special = ~(x.isfinite() & y.isfinite())
    x, y = x.masked_fill(special, 0), y.masked_fill(special, 0)
    difference = (x - y).abs()
    if difference.numel() == 0:
        return Metrics(0.0, 0.0, 0.0, 0.0, (), 0)
    worst = torch.unravel_index(difference.argmax(), difference.shape)
    relative = torch.where(difference == 0, difference, difference / y.abs())
    return Metrics(
        max_abs=difference.max().item(),
        max_rel=relative.max().item(),
        calc_diff=calc_diff(x, y),
        worst_row=row_max(x, y).max().item() if x.ndim else 0.0,
        worst=tuple(int(i) for i in worst),
        special_mismatch=int((special & ~same_special).sum()),
    )


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    atol: float,
    rtol: float,
    name: str = "result",
    max_diff: float | None = None,
    max_row_diff: float | None = None,
) -> Metrics:
    """Every element within `atol` or within `rtol` of the expected magnitude; optional limits on `calc_diff`.

    NaN and infinities have to be at the same places. Returns the metrics; a failure prints them with the first
    and the worst coordinate and both values there.
    """
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    metrics = compare(actual, expected)
    x, y = actual.double(), expected.double()
    difference = (x - y).abs()
    within = (difference <= atol) | (difference <= rtol * y.abs())
    close = (within & difference.isfinite()) | (x == y) | (x.isnan() & y.isnan())
    problems = []
    if not bool(close.all()):
        bad = (~close).nonzero()
        first = tuple(bad[0].tolist())
        problems.append(
            f"{len(bad)} of {close.numel()} elements beyond atol {atol:g} and rtol {rtol:g}; first at {list(first)}: "
            f"got {x[first].item():.9g}, expected {y[first].item():.9g}; worst at {list(metrics.worst)}: "
            f"got {x[metrics.worst].item():.9g}, expected {y[metrics.worst].item():.9g}"
        )
    if max_diff is not None and not metrics.calc_diff <= max_diff:
        problems.append(f"calc_diff above {max_diff:g}")
    if max_row_diff is not None and not metrics.worst_row <= max_row_diff:
        rows = row_max(x, y)
        problems.append(f"calc_diff of row {int(rows.argmax())} above {max_row_diff:g}")
    assert not problems, f"{name}: " + "; ".join(problems) + f"\n  {metrics}"
    return metrics


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor, *, name: str = "result") -> None:
    """Same shape, dtype and bytes (so NaN payloads and signs of zero count); names the first difference."""
    assert actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    if actual.numel() == 0:
        return
    size = actual.element_size()
    x = actual.contiguous().reshape(-1).view(torch.uint8).view(-1, size)
    y = expected.contiguous().reshape(-1).view(torch.uint8).view(-1, size)
    bad = (x != y).any(-1).nonzero().flatten()
    if len(bad):
        place = tuple(int(i) for i in torch.unravel_index(bad[0], actual.shape))
        raise AssertionError(
            f"{name}: {len(bad)} of {actual.numel()} elements differ in their bits; first at {list(place)}: "
            f"got {actual[place].item()!r} ({x[bad[0]].tolist()}), expected {expected[place].item()!r} "
            f"({y[bad[0]].tolist()})"
        )
