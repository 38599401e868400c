"""The comparison on what v41-mini routes on real text."""

from __future__ import annotations

import pytest
from record_mini import MODEL, STEP, TEXT, routing

from orchestrator.balance.eplb.recorded import steps_of
from orchestrator.balance.eplb.report import compare

pytestmark = pytest.mark.skipif(not (MODEL / "model.safetensors.index.json").is_file(), reason="no v41-mini here")


def test_real_routing_is_planned_better_than_in_order():
    rows, experts = routing(4 * TEXT)
    counts = steps_of(rows, experts, STEP, seed=0)
    assert counts.shape == (4 * TEXT // STEP, 16, 12)
    assert (counts.sum(2) == 2 * STEP).all()  # two experts a row in every layer
    row = compare("", counts, 4, 4, window=8)
    assert row.full < 0.85 * row.static
    assert row.full < row.published + 0.01
