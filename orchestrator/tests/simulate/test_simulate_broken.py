"""Each broken variant of the protocol is caught, and by the check that is there for it."""

from __future__ import annotations

import os

import pytest

from orchestrator.simulate.broken import VARIANTS, hunt, rules_without
from orchestrator.simulate.run import simulate
from orchestrator.simulate.scenario import draw

# Kinds that bring a variant to light, and invariants that may be the first to say so.
CAUGHT: dict[str, tuple[tuple[str, ...], set[int]]] = {
    "check_epoch": (("pause", "partition"), {7}),
    "dedup_by_index": (("loss", "duplicate"), {1, 2}),
    "hold_until_taken": ((), {11}),
    "check_parts": (("spoilt_payload",), {2}),
    "forward_cancel": ((), {4, 7}),
    "tell_refusal": (("crash", "isolation", "slow_engine"), {11}),
    "replay_whole_log": (("crash", "dead_rank"), {1, 2}),
    "drop_dead": (("crash", "isolation", "lease_loss"), {7, 11}),
    "drain_waits": (("drain",), {4}),
    "know_retries": (("loss",), {1, 8}),
    "check_incarnation": (("crash", "crash_again", "dead_rank", "delay"), {7}),
    "keep_tombstones": (("delay", "duplicate", "reorder"), {7, 8}),
}


def test_every_rule_has_a_variant():
    assert set(CAUGHT) == set(VARIANTS) and len(VARIANTS) >= 10


@pytest.mark.parametrize("rule", VARIANTS)
def test_a_variant_is_caught(rule):
    kinds, invariants = CAUGHT[rule]
    for seed in range(1, 41):
        result = simulate(draw(seed, 2.0, rules=rules_without(rule), kinds=kinds))
        if not result.ok:
            assert result.invariant in invariants, result.line
            return
    raise AssertionError(f"{rule} was not caught by {seed} seeds")


@pytest.mark.slow
@pytest.mark.parametrize("rule", VARIANTS)
def test_a_variant_is_caught_among_all_faults(rule):
    catch = hunt(rule, range(1, 201), 3.0, min(2, os.cpu_count() or 1))
    assert catch.result is not None, f"{rule} was not caught by {catch.seeds} seeds"
