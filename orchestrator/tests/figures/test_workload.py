"""Traffic made of recorded sessions."""

import math
from pathlib import Path

import numpy as np
import pytest
from figures_kit import write_agentic

from orchestrator.simulate.figures.traces import AGENTIC, MOONCAKE, agentic, mooncake
from orchestrator.simulate.figures.workload import Pattern, mixed, replayed, window


def test_rate_lengths_and_hits_are_those_of_the_trace(folder: Path) -> None:
    pattern = Pattern.of(agentic(folder / AGENTIC), math.inf)
    whole, seen = pattern.requests, window(pattern, 400.0, 50.0, 3)
    assert len(seen) == pytest.approx(20_000, rel=0.05)
    assert seen.tokens.mean() == pytest.approx(whole.tokens.mean(), rel=0.05)
    assert seen.hits.sum() / seen.tokens.sum() == pytest.approx(whole.hits.sum() / whole.tokens.sum(), rel=0.05)
    assert (np.diff(seen.times) >= 0).all() and seen.times[0] >= 0 and seen.times[-1] < 50.0
    known = {(t, h, o) for t, h, o in zip(whole.tokens, whole.hits, whole.outputs, strict=True)}
    assert {(t, h, o) for t, h, o in zip(seen.tokens, seen.hits, seen.outputs, strict=True)} <= known
    assert (seen.missed == seen.tokens - seen.hits).all() and (seen.missed > 0).all()


def test_the_window_is_steady(folder: Path) -> None:
    """Copies that began before the window are in it: its beginning is no emptier than its end."""
    times = window(Pattern.of(agentic(folder / AGENTIC), math.inf), 400.0, 50.0, 5).times
    parts = np.histogram(times, 5, (0, 50))[0]
    assert parts.min() > 0.85 * parts.mean()


def test_a_copy_keeps_its_times(tmp_path: Path) -> None:
    rows = [[0.0, 64, 1, 1, 0], [3.0, 128, 2, 2, 1], [7.0, 192, 3, 3, 2]]
    pattern = Pattern.of(agentic(write_agentic(tmp_path / "a.gz", [rows])), math.inf)
    seen = window(pattern, 0.4, 60.0, 1)
    firsts = seen.times[seen.outputs == 1]
    assert len(firsts) > 2
    for first in firsts[firsts < 50]:
        assert np.isclose(seen.times[seen.outputs == 2], first + 3).any()
        assert np.isclose(seen.times[seen.outputs == 3], first + 7).any()


def test_seeds(folder: Path) -> None:
    pattern = Pattern.of(agentic(folder / AGENTIC), 60.0)
    one, same, other = (window(pattern, 50.0, 5.0, seed) for seed in (1, 1, 2))
    assert (one.times == same.times).all() and (one.hits == same.hits).all()
    assert len(one) != len(other) or (one.times != other.times).any()


def test_an_hour_sped_up_goes_round(folder: Path) -> None:
    chats = mooncake(folder / MOONCAKE)  # 60 in 41.3 s
    seen = replayed(chats, math.inf, 20.0, 30.0, 2)
    assert len(seen) == pytest.approx(600, abs=2)
    assert np.bincount(seen.outputs)[3:].min() >= 9  # each request ten times, but for the ends
    assert (np.diff(seen.times) >= 0).all() and seen.times[-1] < 30.0
    slow = replayed(chats, math.inf, 1.0, 5.0, 2)
    assert len(slow) == pytest.approx(5, abs=1)


def test_mixed_keeps_all(folder: Path) -> None:
    chats = mooncake(folder / MOONCAKE)
    parts = [replayed(chats, math.inf, 20.0, 5.0, seed) for seed in (1, 2)]
    both = mixed(parts)
    assert len(both) == sum(map(len, parts)) and (np.diff(both.times) >= 0).all()
    assert both.tokens.sum() == sum(p.tokens.sum() for p in parts)


def test_bad_input(folder: Path) -> None:
    pattern = Pattern.of(agentic(folder / AGENTIC, 2), 1.0)
    chats = mooncake(folder / MOONCAKE)
    for rate, seconds, name in ((0.0, 1.0, "rate"), (1.0, 0.0, "seconds")):
        with pytest.raises(ValueError, match=f"{name}: got 0.0"):
            window(pattern, rate, seconds, 0)
        with pytest.raises(ValueError, match=f"{name}: got 0.0"):
            replayed(chats, 1.0, rate, seconds, 0)
    with pytest.raises(ValueError, match="parts: got none"):
        mixed([])
