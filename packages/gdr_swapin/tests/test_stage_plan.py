"""The staging plan's own code: rounds, calls, streams, parts, and what an error leaves undone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kernel_core.testing.child import load_file

run_stage = load_file(Path(__file__).parent / "host_stage.py").run_stage
SIZE, AREA, PART, SOURCE = 64, 1 << 20, 64 * 10 + 48, 1 << 30


class Recorder:
    """Notes calls; `copies` are (stream, to, from, size), `deals` (part, at, start, n)."""

    def __init__(self, fail_at: int = -1) -> None:
        self.order: list[tuple[str, int, int]] = []
        self.copies: list[tuple[int, int, int, int]] = []
        self.calls: list[int] = []
        self.strided: list[tuple[int, ...]] = []
        self.deals: list[tuple[int, int, int, int]] = []
        self._fail_at = fail_at

    def _note(self, what: str, stream: int, part: int) -> None:
        if len(self.order) == self._fail_at:
            raise MemoryError(what)
        self.order.append((what, stream, part))

    def before(self, stream, part):
        self._note("before", stream, part)

    def copy(self, stream, to, from_, sizes, n):
        self._note("copy", stream, -1)
        self.calls.append(n)
        self.copies += [(stream, to[i], from_[i], sizes[i]) for i in range(n)]

    def rows(self, stream, *row):
        self._note("rows", stream, -1)
        self.strided.append(row)

    def after(self, stream, part):
        self._note("after", stream, part)

    def deal(self, part, at, start, n):
        self._note("deal", -1, part)
        self.deals.append((part, at, start, n))


def run(slots, recorder=None, /, **changes):
    queue = recorder or Recorder()
    ids = np.array(slots, dtype=np.int64)
    plan = {"source": SOURCE, "stride": SIZE, "slots": ids.ctypes.data, "count": len(ids), "offset": 0, "size": SIZE,
            "area": AREA, "part_bytes": PART, "parts": 3, "part": 0, "first": 2, "per_call": 4, "regular_from": 0,
            "streams": 2, "stream": 0}  # fmt: skip
    return run_stage(queue, **{**plan, **changes}), queue


def test_rounds_grow_to_full_calls_and_take_turns():
    rounds, queue = run(range(0, 80, 2), part=1, stream=1)
    # Ten blocks fit into a part; two calls of four are what a full round takes.
    assert [n for *_, n in queue.deals] == [2, 3, 5, 8, 8, 8, 6] and rounds == 7
    assert queue.calls == [2, 3, 4, 1, *[4, 4] * 3, 4, 2]
    assert [part for part, *_ in queue.deals] == [1, 2, 0, 1, 2, 0, 1]
    assert [at - AREA for _, at, *_ in queue.deals] == [PART * part for part, *_ in queue.deals]
    assert np.cumsum([0, *[n for *_, n in queue.deals]]).tolist()[:-1] == [start for *_, start, _ in queue.deals]
    turns = [(stream, part) for what, stream, part in queue.order if what == "after"]
    assert turns == [(1, 1), (0, 2), (1, 0), (0, 1), (1, 2), (0, 0), (1, 1)]
    assert [what for what, *_ in queue.order][:8] == ["before", "copy", "after", "deal"] * 2
    assert [n for *_, n in run(range(5), first=1)[1].deals] == [1, 2, 2]  # and from one block too
    starts = [call for call in queue.order if call[0] == "before"]
    assert [(stream, part) for _, stream, part in starts] == turns


def test_copies_put_blocks_side_by_side():
    slots = [3, 9, 1, 4, 30, 31, 8]
    _, queue = run(slots, stride=SIZE + 32, offset=16)
    expected = []
    for part, at, start, n in queue.deals:
        del part
        expected += [(at + i * SIZE, SOURCE + 16 + slots[start + i] * (SIZE + 32), SIZE) for i in range(n)]
    assert [copy[1:] for copy in queue.copies] == expected


def test_neighbours_are_one_piece_where_blocks_are_whole_and_rows_elsewhere():
    slots = [4, 5, 6, 9, 10, 2]
    _, queue = run(slots, first=6)
    assert [size // SIZE for *_, size in queue.copies] == [3, 2, 1]
    assert [at - AREA for _, at, *_ in queue.copies] == [0, 3 * SIZE, 5 * SIZE]
    stride = SIZE + 16
    _, queue = run(slots, first=6, stride=stride, regular_from=3)
    assert queue.strided == [(AREA, SIZE, SOURCE + 4 * stride, stride, SIZE, 3)]
    assert [(at - AREA) // SIZE for _, at, *_ in queue.copies] == [3, 4, 5]
    _, queue = run(slots, first=6, stride=stride)
    assert queue.strided == [] and len(queue.copies) == 6 and queue.calls == [4, 2]


def test_a_small_part_holds_a_round():
    rounds, queue = run(range(0, 10, 2), part_bytes=SIZE, first=5)
    assert rounds == 5 and [n for *_, n in queue.deals] == [1] * 5
    assert run([])[0] == 0


def test_an_error_ends_the_run_at_once():
    _, whole = run(range(0, 20, 2))
    for fail_at in range(len(whole.order)):
        queue = Recorder(fail_at)
        with pytest.raises(MemoryError):
            run(range(0, 20, 2), queue)
        assert queue.order == whole.order[:fail_at]


@pytest.mark.parametrize(
    "wrong",
    [{"slots": 0}, {"size": 0}, {"size": PART + 1, "stride": 1 << 12}, {"offset": 16}, {"parts": 1}, {"part": 3},
     {"first": 0}, {"per_call": 0}, {"per_call": 257}, {"streams": 0}, {"stream": 2}, {"count": 2**64 - 1}],
)  # fmt: skip
def test_a_plan_that_makes_no_sense_is_refused(wrong):
    queue = Recorder()
    with pytest.raises(ValueError, match="stage: "):
        run([1, 3, 5], queue, **wrong)
    assert queue.order == []
