"""Seeds that failed once hold now, and so do some hundred others."""

from __future__ import annotations

import os

import pytest
from seeds import KEPT

from orchestrator.simulate.faults import MENU
from orchestrator.simulate.run import simulate
from orchestrator.simulate.scenario import draw
from orchestrator.simulate.sweep import Job, sweep


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: f"seed{kept.seed}")
def test_a_seed_that_failed_once_holds(kept):
    result = simulate(draw(kept.seed, kept.minutes, kinds=kept.kinds))
    assert result.ok, f"{kept.found}; {result.line}"


def test_twelve_seeds_hold():
    summary = sweep([Job(seed, 1.5) for seed in range(500, 512)], 1)
    assert not summary.failed, summary.failed[0].line
    assert summary.outcomes["finished"] > 200


@pytest.mark.slow
def test_two_hundred_seeds_of_ten_minutes_hold():
    """The budget of continuous integration: five minutes on two cores."""
    summary = sweep([Job(seed, 10.0) for seed in range(1, 201)], min(2, os.cpu_count() or 1))
    assert not summary.failed, "\n".join(result.line for result in summary.failed)
    assert summary.runs == 200 and summary.seconds >= 200 * 600
    assert summary.cpu < 600.0, f"{summary.cpu:.0f} s of CPU"
    faults = summary.faults
    assert set(faults) == set(MENU) and min(faults.values()) > 20, faults
    assert summary.outcomes["finished"] > 20_000 and summary.tokens > 200_000
    unaccepted = sum(count for name, count in summary.counts.items() if name.startswith("failed: "))
    assert unaccepted < 0.01 * summary.requests
