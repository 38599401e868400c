"""A row's result must not depend on its neighbours, its place, the number of threads or the time of day."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from kernel_core.testing.compare import assert_bitwise

Result = torch.Tensor | Sequence[torch.Tensor]


def assert_row_invariant(
    fn: Callable[..., Result], *rows: torch.Tensor, pick: Iterable[int] | None = None, name: str = "result"
) -> None:
    """`fn(*rows)` maps tensors with rows in dimension 0 to tensors of the same number of rows, bit for bit.

    Each picked row (default: first, second, middle, last) alone, the batch reversed, and the row at the end of a
    short batch have to give the bytes that it has in the whole batch.
    """
    count = rows[0].shape[0]
    whole = _tuple(fn(*rows))
    for index, part in enumerate(_tuple(fn(*(r.flip(0).contiguous() for r in rows)))):
        assert_bitwise(part.flip(0), whole[index], name=f"{name}[{index}] of the reversed batch")
    for row in sorted(set(pick if pick is not None else {0, min(1, count - 1), count // 2, count - 1})):
        first = max(0, row - 2)
        for start, what in ((row, "alone"), (first, f"in a batch of {row - first + 1}")):
            parts = _tuple(fn(*(r[start : row + 1].contiguous() for r in rows)))
            for index, part in enumerate(parts):
                assert_bitwise(part[-1:], whole[index][row : row + 1], name=f"{name}[{index}], row {row} {what}")


def assert_repeatable(fn: Callable[[], Result], *, times: int = 20, name: str = "result") -> None:
    """`fn()` gives the same bytes every time."""
    first = [part.clone() for part in _tuple(fn())]
    for turn in range(1, times):
        for index, part in enumerate(_tuple(fn())):
            assert_bitwise(part, first[index], name=f"{name}[{index}], run {turn}")


def assert_thread_invariant(
    fn: Callable[[], Result], *, counts: Iterable[int] = (1, 2, 3), name: str = "result"
) -> None:
    """`fn()` gives the same bytes with every number of threads."""
    before = torch.get_num_threads()
    first: list[torch.Tensor] | None = None
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            parts = [part.clone() for part in _tuple(fn())]
            first = first or parts
            for index, part in enumerate(parts):
                assert_bitwise(part, first[index], name=f"{name}[{index}] with {threads} threads")
    finally:
        torch.set_num_threads(before)


def _tuple(result: Result) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
