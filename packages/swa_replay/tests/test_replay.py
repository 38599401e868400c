"""Bounded replay: plans by hand, and by a small model of what a request sees."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import swa_replay
from swa_replay import kept_rows, plan_decoder_tail, plan_encoder_replay, usable_hit


def test_sizes_of_the_model():
    assert swa_replay.ring_rows() == 134
    assert swa_replay.tail_rows() == 7
    assert plan_decoder_tail(1000).keep == 140
    assert swa_replay.exact_tail_rows(1) == 128
    assert swa_replay.exact_tail_rows(20) == 128 + 19 * 127


def test_encoder_replay_of_a_hit():
    plan = plan_encoder_replay(256, 300)
    assert (plan.start, plan.lower, plan.write_floor, plan.replayed, plan.fed) == (128, 128, 256, 128, 172)
    assert plan.first_group(2) == 128 and plan.first_group(1) == 256
    assert not plan.writes_group(127, 2) and plan.writes_group(128, 2)
    assert plan.new_tokens(128, 256) == 0  # inside the replay: no page, and still an advance
    assert plan.new_tokens(200, 290) == 34


def test_a_group_over_the_floor_is_written():
    plan = plan_encoder_replay(129, 400)
    assert plan.writes_group(64, 2) and not plan.writes_group(63, 2)
    assert plan.first_group(2) == 64


def test_cold_start():
    plan = plan_encoder_replay(0, 5)
    assert (plan.start, plan.write_floor, plan.replayed, plan.fed) == (0, 0, 0, 5)


@given(st.integers(1, 2000), st.integers(1, 200), st.data())
def test_replay_rules(length, window, data):
    hit = usable_hit(data.draw(st.integers(0, 2500)), length, window=window, block=16)
    assert hit % 16 == 0 and hit < length and (hit == 0 or hit > window)
    plan = plan_encoder_replay(hit, length, window)
    assert 0 <= plan.start <= hit and plan.replayed + length - hit == plan.fed
    for ratio in (1, 2):
        written = [g for g in range(length // ratio) if plan.writes_group(g, ratio)]
        assert written == list(range(plan.first_group(ratio), length // ratio))
    # rows from the last of the hit on have windows of full size
    for position in range(max(0, hit - 1), length):
        assert max(plan.lower, position - window + 1) == max(0, position - window + 1)


@pytest.mark.parametrize(
    ("matched", "length", "more", "hit"),
    [
        (0, 500, {}, 0),
        (127, 500, {}, 0),
        (128, 500, {}, 0),  # not longer than the window
        (255, 500, {}, 0),
        (256, 500, {}, 256),
        (512, 512, {}, 384),  # the whole prompt: one block back
        (512, 513, {}, 512),
        (300, 280, {}, 256),
        (256, 256, {}, 0),
        (128, 500, {"window_kept": True}, 128),
        (256, 256, {"window_kept": True}, 128),
        (512, 600, {"first_logit": 0}, 0),
        (512, 600, {"first_logit": 400}, 384),
    ],
)
def test_usable_hit(matched, length, more, hit):
    assert usable_hit(matched, length, **more) == hit


@given(st.integers(1, 1200), st.integers(1, 130), st.integers(0, 6), st.lists(st.integers(0, 400), max_size=12))
def test_kept_rows_cover_the_tail_once(length, window, draft_length, cuts):
    plan = plan_decoder_tail(length, window, draft_length)
    edges = sorted({0, length, *(c for c in cuts if c < length)})
    kept = [p for a, b in itertools.pairwise(edges) for p in range(a, b)[kept_rows(a, b, plan)]]
    assert kept == list(range(plan.start, length))
    assert len(kept) == min(length, plan.keep) and plan.exact == (length <= plan.keep)
    # decoding, even after the furthest way back, has a full window above the tail's start
    assert plan.exact or length - draft_length - 1 - (window - 1) > plan.start


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: plan_encoder_replay(300, 300), "hit"),
        (lambda: plan_encoder_replay(128, 300), "hit"),
        (lambda: plan_encoder_replay(-1, 300), "hit"),
        (lambda: plan_decoder_tail(0), "length"),
        (lambda: plan_decoder_tail(5, draft_length=-1), "draft_length"),
        (lambda: kept_rows(5, 3, plan_decoder_tail(9)), "chunk"),
        (lambda: kept_rows(0, 10, plan_decoder_tail(9)), "chunk"),
        (lambda: usable_hit(-1, 5), "matched"),
        (lambda: usable_hit(1, 0), "length"),
    ],
)
def test_bad_plans(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: got"):
        call()


def test_replay_rebuilds_the_bottom_layer_exactly(window_case):
    """After a hit, a ring that held another request is filled by the replay; suffix rows equal those of a cold run.

    At the bottom layer window rows depend on their own token only, so the bounded replay is exact there.
    """
    length, hit, window = 90, 64, 32
    cold = window_case([length], [0], window=window)
    whole = swa_replay.window_attention(**cold)
    plan = plan_encoder_replay(hit, length, window)
    fed = slice(plan.start, length)
    replay = {
        **cold,
        "q": cold["q"][fed],
        "new_rows": cold["new_rows"][fed],
        "rope": cold["rope"][fed],
        "cu_seqlens": torch.tensor([0, plan.fed]).int(),
        "start_pos": torch.tensor([plan.start]),
        "lower": torch.tensor([plan.lower]),
    }
    again = swa_replay.window_attention(**replay)
    assert torch.equal(again[plan.replayed - 1 :], whole[hit - 1 :])
    rings = []
    for case, floor in ((cold, 0), (replay, plan.start)):
        ring = window_case([1], [0], window=window, seed=9)["ring"]
        names = ("new_rows", "ring_slot", "cu_seqlens", "start_pos")
        swa_replay.store_window(**{k: case[k] for k in names}, ring=ring, floor=torch.tensor([floor]))
        rings.append(ring[case["ring_slot"][0], torch.arange(plan.start, length)[-38:] % 38])
    assert torch.equal(rings[0][-window:], rings[1][-window:])
