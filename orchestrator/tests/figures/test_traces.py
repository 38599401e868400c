"""Traces as arrays, and what their requests share, against the real index."""

import math
from pathlib import Path

import numpy as np
import pytest
from figures_kit import write_agentic
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cache import traces as real
from orchestrator.cache.replay import replay
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.simulate.figures.sharing import Gaps, Tracker, together
from orchestrator.simulate.figures.traces import AGENTIC, AZURE, MOONCAKE, agentic, azure, mooncake, traces_folder

SESSION = [[0.0, 640, 9, 10, 0], [100.0, 1280, 0, 20, 10], [130.0, 1290, 7, 20, 20], [900.0, 700, 5, 10, 4]]


def test_hits_by_hand(tmp_path: Path) -> None:
    (session,) = agentic(write_agentic(tmp_path / "a.gz", [SESSION]))
    assert session.tokens.tolist() == [640, 1280, 1290, 700] and session.outputs.tolist() == [9, 0, 7, 5]
    # whole blocks of 128; the last prompt shares 4 blocks of 64 with the one before, last used 770 s ago
    assert session.hits(math.inf).tolist() == [0, 640, 1280, 256]
    assert session.hits(769.0).tolist() == [0, 640, 1280, 0]
    assert session.hits(99.0).tolist() == [0, 0, 1280, 0]  # the path was used 30 s before, all of it
    assert session.hits(0.0).tolist() == [0, 0, 0, 0]


def test_a_hit_leaves_a_token_to_compute(tmp_path: Path) -> None:
    rows = [[0.0, 256, 1, 4, 0], [1.0, 256, 1, 4, 4], [2.0, 257, 1, 4, 4]]
    (session,) = agentic(write_agentic(tmp_path / "a.gz", [rows]))
    assert session.hits(math.inf).tolist() == [0, 128, 256]


@pytest.mark.parametrize("life", [3.0, 60.0, 1000.0, 10_000.0, 1e9])
def test_hits_are_those_of_the_real_index(folder: Path, life: float) -> None:
    ours = agentic(folder / AGENTIC)
    policy = RetentionPolicy(ttl={Retention.AGENT: life, Retention.CHAT: life}, grace_s=0.0)
    outcome = replay(real.agentic(folder / AGENTIC, spread_s=1e-9), 100, policy=policy)
    hits, tokens = sum(s.hits(life).sum() for s in ours), sum(s.tokens.sum() for s in ours)
    assert outcome.requests == sum(len(s.times) for s in ours)
    assert outcome.rate() == pytest.approx(hits / tokens)
    chats = mooncake(folder / MOONCAKE)
    outcome = replay(real.mooncake(folder / MOONCAKE), 100, policy=policy)
    assert outcome.rate() == pytest.approx(chats.hits(life).sum() / chats.tokens.sum())


def test_bytes_held_by_hand() -> None:
    tracker = Tracker(128)
    ids = tracker.fresh(2)
    tracker.note(0.0, 300, ids)
    tracker.note(10.0, 300, ids)
    tracker.note(110.0, 300, ids[:1])
    gaps = tracker.gaps()
    # at 20 s: both are kept 10 s to the second use, then 20 s; the first one comes back at 110 s for 20 s more
    assert gaps.held(20.0) == 128 * (2 * (10 + 20) + 20)
    assert gaps.written(20.0) == 3 * 128 and gaps.written(100.0) == 2 * 128 and gaps.written(5.0) == 5 * 128
    assert gaps.held(1000.0) == 128 * (2 * (10 + 1000) + 100)
    both = together([gaps, gaps])
    assert both.held(20.0) == 2 * gaps.held(20.0) and both.written(20.0) == 2 * gaps.written(20.0)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=12))
def test_longer_lives_never_hit_less_nor_store_less(steps: list[tuple[float, int, int]]) -> None:
    tracker, path = Tracker(64), np.empty(0, np.int64)
    for time, new, kept in sorted(steps, key=lambda step: step[0]):
        path = np.concatenate([path[:kept], tracker.fresh(new)])
        tracker.note(time, 64 * len(path) + 1, path)
    lives = [0.0, 1.0, 50.0, 3000.0, math.inf]
    for shared in tracker.shared:
        hits = [shared.hit(life) for life in lives]
        assert hits == sorted(hits) and all(h % 128 == 0 for h in hits)
    gaps = tracker.gaps()
    held, written = [gaps.held(x) for x in lives[:-1]], [gaps.written(x) for x in lives]
    assert held == sorted(held) and written == sorted(written, reverse=True)


def test_chats_and_bursts(folder: Path) -> None:
    chats, bursts = mooncake(folder / MOONCAKE), azure(folder / AZURE, 10)
    assert len(chats.times) == 60 and chats.hits(math.inf)[0] == 0
    assert chats.hits(math.inf)[3] == 1024 and chats.hits(math.inf)[4] == 512
    assert chats.hits(0.5)[3] == 0  # the block common to all was last used 0.7 s before
    assert len(bursts.times) == 10 and not bursts.hits(math.inf).any() and bursts.times[-1] == 9.0


def test_subsets(folder: Path) -> None:
    assert len(agentic(folder / AGENTIC, 3)) == 3 and len(mooncake(folder / MOONCAKE, 7).times) == 7


def test_where_traces_are(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FATHOM_TRACES", raising=False)
    assert traces_folder(folder, None) == folder
    with pytest.raises(ValueError, match=r"traces: got .*nowhere.*allowed is a folder that holds"):
        traces_folder(tmp_path / "nowhere", folder)
    with pytest.raises(ValueError, match=r"traces: got none"):
        traces_folder(None, tmp_path / "project")
    monkeypatch.setenv("FATHOM_TRACES", str(folder))
    assert traces_folder(None, None) == folder


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"size: got 100"):
        Tracker(100)
    with pytest.raises(ValueError, match=r"path: got .*none"):
        agentic(tmp_path / "none")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match=r"path: got .*empty"):
        mooncake(tmp_path / "empty")
    assert Gaps(np.empty(0), np.empty(0, np.int64)).held(5.0) == 0.0
