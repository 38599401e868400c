"""Whole runs: the same seed is the same run, traces can be read, failures shrink, sweeps add up."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from orchestrator.roles.rules import Rules
from orchestrator.simulate.broken import VARIANTS, rules_without
from orchestrator.simulate.run import simulate
from orchestrator.simulate.scenario import Scenario, draw
from orchestrator.simulate.shrink import shrink
from orchestrator.simulate.sweep import Job, sweep


def told(scenario, only=frozenset()):
    lines = []
    return simulate(scenario, lines.append, only), lines


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_is_a_run(seed):
    (one, first), (two, second) = told(draw(seed, 1.0)), told(draw(seed, 1.0))
    assert first == second and len(first) > 500
    assert replace(one, cpu=0.0) == replace(two, cpu=0.0)
    assert told(draw(seed + 1, 1.0))[1] != first


def test_no_hash_decides_anything():
    """Two processes hash names differently; a set that is walked through would show here."""
    code = (
        "from orchestrator.simulate.run import simulate; from orchestrator.simulate.scenario import draw\n"
        "r = simulate(draw(3, 1.5)); print(r.line, r.events, r.steps, r.tokens, sorted(r.counts.items()))"
    )
    said = []
    for seed in ("0", "7"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONHASHSEED": seed}
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] and said[0].startswith("seed 3: ok")


def test_looking_does_not_change_a_run():
    scenario = draw(4, 1.0)
    assert replace(simulate(scenario), cpu=0.0) == replace(told(scenario)[0], cpu=0.0)


def test_a_trace_can_be_about_one_request():
    result, lines = told(draw(3, 1.0), frozenset({"r1"}))
    assert result.ok and any("Submit" in line for line in lines)
    assert all("request=r1," in line or "!!" in line or " ok " in line for line in lines)
    assert all(len(line) < 220 for line in lines)


def test_without_faults_nothing_fails_and_hits_happen():
    results = [simulate(draw(seed, 2.0, kinds=())) for seed in range(1, 7)]
    assert all(result.ok for result in results)
    assert not any(key.startswith(("fault", "failed", "watchdog")) for result in results for key in result.counts)
    assert sum(result.counts.get("store read", 0) for result in results) > 20
    assert {name for result in results for name in result.outcomes} <= {"finished", "cancelled", "rejected"}
    assert sum(result.outcomes["finished"] for result in results) > 100


def test_a_failure_shrinks_and_still_fails():
    rules = rules_without("drain_waits")
    result = next(r for seed in range(1, 30) if not (r := simulate(draw(seed, 2.0, rules=rules))).ok)
    said = []
    small = shrink(result, runs=60, progress=said.append)
    assert small.invariant == result.invariant and len(said) == 2
    assert len(small.faults) < max(2, len(result.faults)) and small.requests < max(3, result.requests)
    again = simulate(small.scenario)
    assert (again.invariant, again.what, again.at) == (small.invariant, small.what, small.at)
    assert simulate(replace(small.scenario, rules=Rules())).ok
    with pytest.raises(ValueError, match="result"):
        shrink(simulate(draw(3, 0.5)))


def test_a_sweep_is_the_same_over_any_number_of_processes():
    jobs = [Job(seed, 0.5) for seed in range(1, 5)]
    seen = []
    one, two = sweep(jobs, 1, seen.append), sweep(jobs, 2)
    assert len(seen) == one.runs == two.runs == 4 and not one.failed
    assert (one.events, one.tokens, one.outcomes, one.counts) == (two.events, two.tokens, two.outcomes, two.counts)
    assert one.faults and set(one.faults) <= {name[6:] for name in one.counts}
    with pytest.raises(ValueError, match="processes"):
        sweep(jobs, 0)


def test_bad_scenarios_are_refused():
    with pytest.raises(ValueError, match="seconds"):
        Scenario(1, 0.0)
    with pytest.raises(ValueError, match=f"break: got 'x', allowed are {VARIANTS[0]}"):
        rules_without("x")
    with pytest.raises(ValueError, match="fault"):
        simulate(draw(1, 0.5, kinds=("meteor",)))
