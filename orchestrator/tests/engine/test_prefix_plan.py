"""Where prompts start after hits, by the rules alone."""

from __future__ import annotations

import pytest

from orchestrator.engine.prefix_plan import COLD, Start, choose_start, snapshot_stops

W, KEEP = 128, 140


def start(mode, matched, length, kept=(), stride=512, lower=None):
    lower = max(0, length - KEEP) if lower is None else lower
    return choose_start(mode, matched, length, lower, lambda b: b in kept, window=W, stride=stride)


@pytest.mark.parametrize("mode", ["bounded", "exact", "canonical"])
def test_nothing_matched_or_nothing_whole_starts_cold(mode):
    assert start(mode, 0, 1000) == start(mode, 127, 1000, {0}) == COLD


def test_bounded_replays_the_window_and_leaves_a_token():
    assert start("bounded", 512, 1000) == Start(512, 384, 384)
    assert start("bounded", 512, 512) == Start(384, 256, 256)  # a whole prompt falls back by a block
    assert start("bounded", 128, 1000) == COLD  # all of it would be computed again
    assert start("bounded", 256, 256) == COLD


def test_a_snapshot_ends_at_or_before_the_decoder_tail():
    every = set(range(128, 2048, 128))
    assert start("bounded", 512, 1000, every) == start("exact", 512, 1000, every) == Start(512, 512, 0, window=True)
    assert start("exact", 896, 1000, every) == Start(768, 768, 0, window=True)
    assert start("exact", 896, 896 + 140, every) == Start(896, 896, 0, window=True)
    assert start("exact", 896, 1000, every, lower=0) == COLD  # all decoder rows are wanted


def test_exact_takes_a_distant_snapshot_and_bounded_does_not():
    assert start("exact", 896, 1000, {128}) == Start(128, 128, 0, window=True)
    assert start("bounded", 896, 1000, {128}) == Start(896, 768, 768)
    assert start("exact", 896, 1000) == COLD


def test_canonical_starts_where_cold_prompts_rebuild():
    assert start("canonical", 500 // 128 * 128, 2000) == COLD
    assert start("canonical", 512, 2000) == Start(512, 384, 384)
    assert start("canonical", 1408, 2000) == Start(1024, 896, 896)
    assert start("canonical", 1408, 2000, {1152}) == Start(1152, 1152, 896, window=True)
    assert start("canonical", 1408, 2000, {896, 1024}) == Start(1024, 896, 896)  # of the segment before
    assert start("canonical", 512, 513, lower=384) == Start(512, 384, 384)


def test_canonical_segments_before_the_last_need_no_decoder():
    """The decoder's tail lies in the last segment, so a snapshot in an earlier one may stand at the very hit."""
    assert start("canonical", 896, 1030, {896}, lower=1024 - W) == Start(896, 896, 384, window=True)


def test_snapshots_stand_where_a_repeated_or_longer_prompt_can_start():
    assert snapshot_stops(1000, 0, 860, 0) == [768, 896]
    assert snapshot_stops(1024, 256, 884, 128) == [256, 768, 896, 1024]
    assert snapshot_stops(1000, 896, 860, 896) == []
    assert snapshot_stops(100, 0, 0, 0) == []
    assert snapshot_stops(2000, 0, 0, 0) == [1664, 1792, 1920]
