"""Fault by phase: every phase is met, nothing is lost or repeated, and the file says what it should."""

from __future__ import annotations

import json

import pytest

from orchestrator.simulate.faults import MENU
from orchestrator.simulate.matrix import PHASES, Cell, Found, as_dict, cells, run_cell, run_cells


@pytest.mark.parametrize("phase", PHASES)
def test_a_crash_in_each_phase(phase):
    found = run_cell(Cell("crash", phase, 1))
    assert found.struck and found.ok, found
    assert 0 < found.recover < 30 and found.at >= 10.0


def test_a_crash_costs_time_and_a_bit_on_a_disk_none():
    crash, rot = run_cell(Cell("crash", "decoding", 2)), run_cell(Cell("rot", "decoding", 2))
    assert crash.recover > rot.recover and crash.slower > 0.5 and rot.slower < 0.5


def test_the_table():
    wanted = cells(["drain", "loss"], [1])
    assert len(wanted) == 2 * len(PHASES) and len(cells(None, [1, 2])) == 2 * len(PHASES) * len(MENU)
    seen = []
    table = as_dict(run_cells(wanted[:4], 1, seen.append))
    assert len(seen) == 4 and json.loads(json.dumps(table)) == table
    assert table["phases"] == list(PHASES) and table["runs"] == 4
    assert (table["lost"], table["repeated"], table["failed"]) == (0, 0, 0)
    for cell in table["cells"]:
        spread = cell["recover_s"]
        assert 0 <= spread["least"] <= spread["median"] <= spread["most"]
    with pytest.raises(ValueError, match="fault"):
        cells(["meteor"], [1])


def test_what_goes_wrong_is_counted():
    wrong = Found(Cell("crash", "queued", 1), True, 10.0, lost=2, repeated=1, what="invariant 1 x", recover=3.0)
    right = Found(Cell("crash", "queued", 2), True, 10.0, recover=1.0)
    never = Found(Cell("crash", "queued", 3), struck=False)
    assert not wrong.ok and right.ok
    table = as_dict([wrong, right, never])
    assert (table["runs"], table["lost"], table["repeated"], table["failed"]) == (2, 2, 1, 1)
    assert table["cells"][0]["recover_s"] == {"least": 1.0, "median": 2.0, "most": 3.0}
