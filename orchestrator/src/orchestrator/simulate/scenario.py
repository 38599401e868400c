"""What a run consists of: everything that its seed decides before the first event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.roles.rules import Rules
from orchestrator.roles.settings import Settings
from orchestrator.simulate.faults import MENU
from orchestrator.simulate.network import HEALTHY, LinkQuality
from orchestrator.simulate.streams import Streams
from orchestrator.simulate.toy.engine import EngineShape
from orchestrator.simulate.workload import Mix

SETTLE = 200.0
"""Virtual seconds within which all must have ended once everything is healed."""


@dataclass(frozen=True)
class Shape:
    """Machines of a service: how many of each role, and what their engines are like.

    `watchdog`: seconds of a step after which a node ends its process; the worker has a slower watchdog of its own.
    """

    entries: int = 2
    encoders: int = 1
    prefills: int = 2
    decodes: int = 2
    prefill: EngineShape = field(default_factory=EngineShape)
    decode: EngineShape = field(default_factory=EngineShape)
    disks: int = 14
    store_blocks: int = 200
    link: LinkQuality = HEALTHY
    watchdog: float = 8.0


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        seed: of everything that is drawn while it runs. seconds: with faults and arrivals; then all is healed.
        every: seconds between faults on average; 0 for none. kinds: of faults that may be drawn, None for all.
        without: numbers of faults, and `skipped` of arrivals, that a shrunk run leaves out.
        settle: seconds until all must have ended after healing.
    """

    seed: int
    seconds: float = 600.0
    shape: Shape = field(default_factory=Shape)
    mix: Mix = field(default_factory=Mix)
    settings: Settings = field(default_factory=Settings)
    rules: Rules = field(default_factory=Rules)
    every: float = 8.0
    kinds: tuple[str, ...] | None = None
    without: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    settle: float = SETTLE

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds: got {self.seconds}, allowed are virtual seconds above 0")


def draw(
    seed: int,
    minutes: float = 10.0,
    *,
    rules: Rules | None = None,
    kinds: Sequence[str] | None = None,
    every: float | None = None,
) -> Scenario:
    """The run of a seed. Sizes that make rare branches common are drawn too: tiny pools, single machines, short
    leases, many drafts, prefill that stops early."""
    random = Streams(seed)("scenario")
    prefill = EngineShape(
        blocks=random.choice((24, 48, 200)),
        ranks=random.choice((1, 2, 4)),
        stop_early=random.random() < 0.35,
        chunk=random.choice((128, 256, 1024)),
        launch=random.choice((0.02, 0.1, 0.3)),
        token=random.choice((1e-4, 1e-3)),
        copy=random.choice((0.002, 0.1, 0.5)),
    )
    ranks = random.choice((1, 2, 3, 4))
    decode = EngineShape(
        blocks=random.choice((20, 40, 160)),
        ranks=ranks,
        fewest=(ranks + 1) // 2,
        rows=random.choice((2, 4, 8)),
        drafts=random.choice((0, 3, 5)),
        launch=random.choice((0.05, 0.2, 0.5)),
        row=random.choice((0.002, 0.02)),
        copy=random.choice((0.002, 0.1, 0.5)),
    )
    shape = Shape(
        entries=random.choice((1, 2, 3)),
        encoders=random.choice((1, 1, 2)),
        prefills=random.choice((1, 2, 3)),
        decodes=random.choice((2, 2, 3, 4)),
        prefill=prefill,
        decode=decode,
        disks=random.choice((12, 13, 16)),
        store_blocks=random.choice((60, 400)),
        watchdog=random.choice((8.0, 1000.0)),
        link=random.choice((HEALTHY, LinkQuality(delay=0.01, jitter=0.01), LinkQuality(delay=0.002, jitter=0.05))),
    )
    if kinds is None:  # a few kinds at a time: what one of them does is not hidden behind all the others
        kinds = random.sample(list(MENU), random.choice((3, 6, 12, len(MENU))))
    return Scenario(
        seed,
        60.0 * minutes,
        shape,
        Mix(rate=random.choice((0.2, 0.5, 0.9)), largest=min(prefill.blocks, decode.blocks) * BLOCK_TOKENS),
        _settings(random),
        rules or Rules(),
        every=random.choice((4.0, 8.0, 20.0)) if every is None else every,
        kinds=tuple(kinds),
    )


def _settings(random: Random) -> Settings:
    """Times of the protocol: as they are, or shorter.

    A request may wait for its first token as long as faults keep the service from it: one that is forgotten is found
    when all is healed, and is not excused by a deadline before.
    """
    beat = random.choice((0.5, 0.5, 0.8))
    return Settings(
        beat=beat,
        resend=random.choice((0.5, 1.0)),
        first_token=2000.0,
        silence=random.choice((2.5, 4.0, 4.0)),
        grace=random.choice((0.0, 2.0, 60.0)),
        tombstone=random.choice((10.0, 60.0)),
    )
