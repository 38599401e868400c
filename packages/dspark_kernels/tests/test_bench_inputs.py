"""The GPU benches' problems, built small on the CPU: valid for the ops, with the bytes that they state."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from dspark_kernels import schedule, verify


@pytest.fixture
def inputs(monkeypatch):
    folder = Path(__file__).parents[1] / "bench"
    monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)
    yield importlib.import_module("spec_inputs")
    for name in set(sys.modules) - known:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_schedules_fill_their_rows(inputs):
    given = inputs.schedule_inputs(20, 5)
    plan = schedule(**given)
    assert int(plan.lengths.sum()) == 64 == int(given["budget"]) and int(plan.host[-1]) == given["capacity"]


@pytest.mark.parametrize("setting", ["greedy", "plain", "top_p", "top_k"])
def test_steps_are_valid_and_counted(inputs, setting):
    given = inputs.verify_inputs(6, 3, 500, setting, 0.5)
    out = verify(**given)
    assert not bool(out.failed.any()) and bool((out.counts >= 1).all())
    rejected = 0 if setting == "greedy" else int((out.accepted < 3).sum())
    assert inputs.verify_bytes(given, out.accepted) == 6 * 4 * 500 * 4 + rejected * 500 * 4 + 6 * 4 * 12


def test_the_less_noise_the_more_is_accepted(inputs):
    shares = [
        verify(**inputs.verify_inputs(40, 3, 200, "plain", noise)).accepted.float().mean() for noise in (0.0, 0.5, 4.0)
    ]
    assert shares[0] == 3 and shares[0] > shares[1] > shares[2]


def test_points_that_others_name(inputs):
    bench = importlib.import_module("bench_dspark_cuda")
    points = {case.point for b in bench.BENCHES for case in b.cases}
    assert {"dspark_schedule_r1024", "dspark_verify_768"} <= points
    if importlib.util.find_spec("dspark_kernels._cuda") is None:
        with pytest.raises(NotImplementedError, match="not built"):
            bench.BENCHES[0].cases[0].make()
