"""Traffic of a cluster made of recorded sessions: many copies of each, started at random, seen through a window.

Copies keep the times within their session as recorded, whatever the service does (an open loop). What a copy's requests
find in the cache comes from its own past, so a window of a minute knows what was kept for days.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernel_core.check import require
from orchestrator.simulate.figures.traces import Session


@dataclass(frozen=True)
class Arrivals:
    """Requests by time. times: float64 seconds; tokens, hits, outputs: int64, `hits` of `tokens` are cached."""

    times: np.ndarray
    tokens: np.ndarray
    hits: np.ndarray
    outputs: np.ndarray

    def __len__(self) -> int:
        return len(self.times)

    @property
    def missed(self) -> np.ndarray:
        """int64 tokens that have to be computed."""
        return self.tokens - self.hits


@dataclass(frozen=True)
class Pattern:
    """What a request of each kind asks for, apart from when it comes: all requests of some sessions, `life` applied.

    Attributes:
        sessions: with their times. hits: int64, one array a session.
    """

    sessions: Sequence[Session]
    hits: Sequence[np.ndarray]

    @classmethod
    def of(cls, sessions: Sequence[Session], life: float) -> Pattern:
        return cls(sessions, [s.hits(life) for s in sessions])

    @property
    def requests(self) -> Arrivals:
        """Every request once, at its recorded time within the session."""
        return Arrivals(
            np.concatenate([s.times for s in self.sessions]),
            np.concatenate([s.tokens for s in self.sessions]),
            np.concatenate(list(self.hits)),
            np.concatenate([s.outputs for s in self.sessions]),
        )


def window(pattern: Pattern, rate: float, seconds: float, seed: int) -> Arrivals:
    """`seconds` of steady traffic of `rate` requests a second in the mean.

    Every session starts as a Poisson process; copies that began before the window are in it with what is left of them.
    """
    require(rate > 0, "rate", rate, "above 0, requests a second")
    require(seconds > 0, "seconds", seconds, "above 0")
    random = np.random.default_rng(seed)
    starts_a_second = rate / sum(len(s.times) for s in pattern.sessions)  # of each session
    picked: list[tuple[np.ndarray, ...]] = []
    for session, hits in zip(pattern.sessions, pattern.hits, strict=True):
        length = float(session.times[-1])
        copies = random.poisson(starts_a_second * (length + seconds))
        begins = random.uniform(-length, seconds, copies)
        first = np.searchsorted(session.times, -begins)
        last = np.searchsorted(session.times, seconds - begins)
        counts = last - first
        which = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        times = np.repeat(begins, counts) + session.times[which]
        picked.append((times, session.tokens[which], hits[which], session.outputs[which]))
    return _sorted([Arrivals(*(np.concatenate(column) for column in zip(*picked, strict=True)))])


def replayed(session: Session, life: float, rate: float, seconds: float, seed: int) -> Arrivals:
    """`seconds` of one recorded hour sped up to `rate` requests a second, from a random time on, round and round.

    What requests find is that of the recorded times.
    """
    require(rate > 0, "rate", rate, "above 0, requests a second")
    require(seconds > 0, "seconds", seconds, "above 0")
    length = float(session.times[-1]) + (float(session.times[-1]) / max(1, len(session.times) - 1) or 1.0)
    faster = rate * length / len(session.times)
    begin = np.random.default_rng(seed).uniform(0, length)
    rounds = np.arange(int(np.ceil(seconds * faster / length)) + 2)
    times = ((rounds[:, None] * length + session.times).ravel() - begin) / faster
    inside = np.flatnonzero((times >= 0) & (times < seconds))
    which = inside % len(session.times)
    found = Arrivals(times[inside], session.tokens[which], session.hits(life)[which], session.outputs[which])
    return _sorted([found])


def mixed(parts: Sequence[Arrivals]) -> Arrivals:
    """Several kinds of traffic at once."""
    require(len(parts) > 0, "parts", "none", "1 or more")
    return _sorted(parts)


def _sorted(parts: Sequence[Arrivals]) -> Arrivals:
    times = np.concatenate([p.times for p in parts])
    order = np.argsort(times, kind="stable")
    return Arrivals(
        times[order],
        np.concatenate([p.tokens for p in parts])[order],
        np.concatenate([p.hits for p in parts])[order],
        np.concatenate([p.outputs for p in parts])[order],
    )
