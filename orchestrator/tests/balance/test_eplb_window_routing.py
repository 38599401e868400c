"""Counts without padding and in the right layer; a copy for every token that depends on nothing but its place."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.balance.eplb import LoadWindow, Placement, initial, merge, rank_loads, routing_table, routing_tables
from orchestrator.balance.eplb.planner import plan_full
from orchestrator.balance.eplb.recorded import steps_of


def note(window: LoadWindow, step: int, rng: np.random.Generator, tokens: int, padding: int) -> np.ndarray:
    """A step of random routing whose padding rows hold ids out of range; what it should count."""
    expected = np.zeros((2, 8))
    for layer in range(2):
        ids = (
            np.stack([rng.permutation(8)[:3] for _ in range(tokens + padding)])
            if tokens + padding
            else np.zeros((0, 3), int)
        )
        valid = rng.permutation(np.arange(tokens + padding) < tokens)
        expected[layer] = np.bincount(ids[valid].ravel(), minlength=8)
        ids[~valid] = 10**6
        window.note(layer, ids, valid)
    window.end_step(step, tokens, 3)
    return expected


def test_the_ring_keeps_the_last_steps_without_padding():
    rng = np.random.default_rng(0)
    window = LoadWindow(2, 8, 4)
    expected = [note(window, step, rng, tokens=step % 3, padding=step % 2) for step in range(7)]
    assert window.steps.tolist() == [3, 4, 5, 6]
    assert (window.counts() == np.stack(expected[3:])).all()
    assert window.counts().sum(2).tolist() == [[3.0 * (step % 3)] * 2 for step in range(3, 7)]


def test_counts_in_the_wrong_layer_are_refused_and_leave_the_ring():
    rng = np.random.default_rng(0)
    window = LoadWindow(2, 8, 4)
    note(window, 0, rng, 2, 0)
    before = window.counts()
    ids, valid = np.array([[0, 1, 2]]), np.ones(1, np.bool_)
    window.note(0, ids, valid)
    with pytest.raises(ValueError, match="layer: got 0, allowed is each once a step"):
        window.note(0, ids, valid)
    with pytest.raises(ValueError, match="tokens: got 1, but layers \\[1\\]"):
        window.end_step(1, 1, 3)
    with pytest.raises(ValueError, match="ids out of range"):
        window.note(0, ids + 6, valid)
    with pytest.raises(ValueError, match="step: got 0, allowed is above 0"):
        note(window, 0, rng, 1, 0)
    assert (window.counts() == before).all()
    note(window, 1, rng, 1, 1)  # and goes on
    assert window.steps.tolist() == [0, 1]


def test_ranks_are_summed_over_the_steps_that_all_have():
    rng = np.random.default_rng(0)
    a, b = LoadWindow(2, 8, 3), LoadWindow(2, 8, 3)
    counts_a = [note(a, step, rng, 2, 1) for step in (1, 2, 3)]
    b.end_step(2, 0, 3)  # an idle rank notes nothing
    counts_b = note(b, 3, rng, 4, 0)
    b.end_step(4, 0, 3)
    assert (merge([a, b]) == np.stack([counts_a[1], counts_a[2] + counts_b])).all()


def test_own_copy_first_then_by_rank_and_token():
    table = routing_table(np.array([[0, 1], [0, 2], [0, 3]], np.int32), 4)
    assert table.counts.tolist() == [3, 1, 1, 1]
    assert table.copies.tolist() == [[0, 2, 4], [1, -1, -1], [3, -1, -1], [5, -1, -1]]
    ids = np.array([[0, 1], [0, 3], [-1, 2]])
    assert table.choose(ids, 1, np.arange(3)).tolist() == [[2, 1], [2, 5], [-1, 3]]
    two = routing_table(np.array([[0, 1], [0, 2], [3, 1]], np.int32), 4)
    assert two.choose(np.zeros((4, 1), int), 2, np.arange(4))[:, 0].tolist() == [0, 2, 0, 2]
    assert two.choose(np.zeros((0, 2), int), 2, np.arange(0)).shape == (0, 2)
    with pytest.raises(ValueError, match="an expert without a copy"):
        routing_table(np.array([[0, 2]], np.int32), 4).choose(np.array([[1]]), 0, np.arange(1))
    with pytest.raises(ValueError, match="too high"):
        table.choose(np.array([[4]]), 0, np.arange(1))


def test_what_dispatch_sends_is_what_the_plan_predicts():
    rng = np.random.default_rng(2)
    ranks, tokens, experts = 6, 400, 16
    popularity = rng.lognormal(0, 1, experts)
    placement = plan_full(
        np.tile(popularity, (2, 1, 1)).astype(np.float32), initial(1, experts, ranks, 4), np.ones(6, bool)
    )
    ids = rng.choice(experts, (ranks, tokens, 2), p=popularity / popularity.sum())
    sent = np.zeros(ranks)
    for rank in range(ranks):
        slots = routing_tables(placement)[0].choose(ids[rank], rank, np.arange(tokens))
        assert (placement.experts[0].ravel()[slots] == ids[rank]).all()
        sent += np.bincount(slots.ravel() // 4, minlength=ranks)
    counts = np.bincount(ids.ravel(), minlength=experts).astype(np.float32)
    predicted = rank_loads(placement, counts[None, None])[0, 0]
    assert np.abs(sent - predicted).max() < 0.05 * predicted.mean()


def test_a_token_is_routed_alike_in_any_batch():
    placement = initial(1, 8, 4, 4)
    table = routing_tables(placement)[0]
    ids = np.random.default_rng(0).integers(0, 8, (9, 3))
    whole = table.choose(ids, 2, np.arange(9))
    parts = [table.choose(ids[i : i + 1], 2, np.array([i]))[0] for i in range(9)]
    assert (whole == np.stack(parts)).all()


def test_recorded_rows_become_steps():
    rows = {3: np.array([[0, 1], [1, 2], [2, 3], [3, 0], [0, 1]]), 1: np.array([[4, 1]] * 5)}
    counts = steps_of(rows, 5, tokens=2, seed=-1)
    assert counts.shape == (2, 2, 5)
    assert counts[0].tolist() == [[0, 2, 0, 0, 2], [1, 2, 1, 0, 0]]
    assert steps_of(rows, 5, tokens=5, seed=1)[0, 1].tolist() == [3, 3, 2, 2, 0]
    with pytest.raises(ValueError, match="tokens: got 6"):
        steps_of(rows, 5, tokens=6)


def test_placement_refuses_what_is_not_one():
    with pytest.raises(ValueError, match="ids from 0 to 8"):
        Placement(np.array([[[0, 8]]], np.int32), 8)
    with pytest.raises(ValueError, match="some on dead ranks"):
        initial(1, 4, 4, 4).check(np.array([True, True, True, False]))
