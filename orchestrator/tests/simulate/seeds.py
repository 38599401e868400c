"""Seeds that have failed once, each with what it found. They are run again and again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """Attributes:
    seed, minutes, kinds: of the run, as `scenario.draw` takes them. found: what was wrong then.
    """

    seed: int
    minutes: float
    found: str
    kinds: tuple[str, ...] | None = None


KEPT: tuple[Kept, ...] = (
    Kept(3, 1.5, "the order of a set decided in which order the router told workers: no seed gave the same run twice"),
    Kept(4, 2.0, "prompts failed for want of memory that others were about to give back"),
    Kept(58, 10.0, "a decode worker that had been stopped for long ran one step more of a request it had lost"),
    Kept(79, 10.0, "the toy group stepped between a rank's death and the word of it"),
    Kept(97, 10.0, "deaths of others took a waiting request's attempts within some seconds, and it failed"),
    Kept(246, 10.0, "clients were sent away for minutes by a queue as it was while most engines were gone"),
    Kept(256, 10.0, "an entry whose clock jumped forgot an ended request and took its second copy for a new one"),
)
