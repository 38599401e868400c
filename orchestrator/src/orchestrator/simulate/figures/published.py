"""Every constant of the figures in one place, with where it comes from.

None was measured by this project. "published" is what the makers of V4.1-Flash said of their service, "arithmetic"
follows from published numbers, "assumed" is ours and would have to be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kernel_core.check import require
from orchestrator.balance.cost_curve import CostCurve
from orchestrator.balance.prefill import PUBLISHED, PrefillCost

Kind = Literal["published", "arithmetic", "assumed"]


@dataclass(frozen=True)
class Constant:
    """A number with its unit, its kind and its origin."""

    name: str
    value: float
    unit: str
    kind: Kind
    origin: str


HIT_RATE = Constant("hit rate", 0.96, "of input tokens", "published", "service numbers of the makers")
MEAN_INPUT = Constant("mean input", 77_000, "tokens", "published", "service numbers of the makers")
MEAN_TTFT = Constant("mean time to first token", 0.4, "s", "published", "service numbers of the makers")
PREFILL_MISSED = Constant("prefill, missed tokens", 60_000, "a second a GPU", "published", "at 4,096 tokens a step")
PREFILL_ALL = Constant("prefill with hits", 1.5e6, "a second a GPU", "published", "25 times the missed ones")
DECODE_RATE = Constant("decode", 14_000, "tokens a second a GPU", "published", "service numbers of the makers")
USER_RATE = Constant("decode for a user", 230, "tokens a second", "published", "service numbers of the makers")
ACCEPTED = Constant("accepted length", 3.2, "tokens a step", "published", "drafts of DSpark, 60 sequences a rank")
DAILY = Constant("tokens a day", 155e12, "input and output", "published", "one cluster; which tokens count is not said")
BALANCED_SHARE = Constant("share of balanced", 0.8, "of an offline run", "published", "service numbers of the makers")
TOKEN_BYTES = Constant("block KV", 890, "bytes a token", "published", "2.5 rows of 356 bytes")
WINDOW_BYTES = Constant("window state", 1_415_040, "bytes a request", "published", "20 layers x 134 x 528 bytes")
RETENTION = Constant("retention", 72, "hours", "published", "agents 3 days, chats 7")
STRIPE = Constant("bytes stored for a byte", 1.2, "-", "published", "erasure code 10 + 2")
READ_AHEAD = Constant("bytes read for a byte", 1.1, "-", "published", "11 shards asked, 10 decode")
NODE_READ = Constant("storage node, reads", 6.6 * 2**40 / 180, "bytes a second", "published", "3FS: 6.6 TiB/s of 180")
NODE_SPACE = Constant("storage node, space", 16 * 14 * 2**40, "bytes", "published", "3FS: 16 disks of 14 TiB")
NODE_GPUS = Constant("GPUs a prefill host", 8, "-", "published", "topology of the makers")
NIC = Constant("network of a host", 50e9, "bytes a second", "published", "about 400 Gb/s for 8 GPUs")
INDEX_BYTES = Constant(
    "index bytes a decode step reads", 170, "bytes a token held", "arithmetic", "2.5 keys of 68 bytes, once a step"
)
GPU_READ = Constant("GPU memory, index scan", 4e12, "bytes a second", "assumed", "half of SM100's 8 TB/s")
POOL = Constant("cache of a decode GPU", 100e9, "bytes", "assumed", "192 GB less weights and work space")
MATCH = Constant("prefix match", 1.5e-3, "s", "assumed", "one call for all keys of a prompt")
STORE_LATENCY = Constant("store, first byte", 2e-3, "s", "assumed", "metadata, queueing on flash, 10 of 11 shards")
SWAP = Constant("host to device", 50e9, "bytes a second a GPU", "assumed", "PCIe 5; all but the first source overlaps")
PAIR = Constant("pair term", 0.011e-9, "s a pair of tokens", "assumed", "index scores; 0 in the published constants")

CONSTANTS: tuple[Constant, ...] = (
    HIT_RATE, MEAN_INPUT, MEAN_TTFT, PREFILL_MISSED, PREFILL_ALL, DECODE_RATE, USER_RATE, ACCEPTED, DAILY,
    BALANCED_SHARE, TOKEN_BYTES, WINDOW_BYTES, RETENTION, STRIPE, READ_AHEAD, NODE_READ, NODE_SPACE, NODE_GPUS, NIC,
    INDEX_BYTES, GPU_READ, POOL, MATCH, STORE_LATENCY, SWAP, PAIR,
)  # fmt: skip

PREFILL_POINTS: tuple[tuple[int, float], ...] = ((4_096, 0.070), (16_384, 0.200), (65_536, 0.730))
"""Tokens of a step on each rank, and its seconds, as published."""

DECODE_POINTS: tuple[tuple[int, float], ...] = ((8, 330.0), (60, 230.0), (256, 100.0))
"""Sequences on each rank, and tokens a second for a user, as published."""

PREFILL = PUBLISHED
"""24.4 ms a step and 10.74 us a token: the line through PREFILL_POINTS. No term for the context before a chunk."""

PREFILL_WITH_PAIRS = PrefillCost(launch=PUBLISHED.launch, token=PUBLISHED.token, pair=PAIR.value)
"""The same with an assumed cost for each pair of a new token and one before it."""

LARGEST_STEP = PREFILL_POINTS[-1][0]


@dataclass(frozen=True)
class DecodeCost:
    """Seconds of a decode step of ranks that meet at every expert layer: the fullest rank's rows, the longest's tokens.

    Attributes:
        curve: seconds by sequences a rank, without what their tokens take. token: seconds for each token held.
        accepted: tokens that a sequence gains in a step.
    """

    curve: CostCurve
    token: float
    accepted: float

    def __post_init__(self) -> None:
        require(self.token >= 0, "token", self.token, "0 or more, seconds")
        require(self.accepted >= 1, "accepted", self.accepted, "1 or more, tokens a step")

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]], context: float, token: float, accepted: float) -> DecodeCost:
        """Through published points (sequences a rank, tokens a second for a user) at `context` tokens a sequence."""
        seconds = tuple(accepted / rate - token * context * count for count, rate in points)
        return cls(CostCurve(tuple(count for count, _ in points), seconds), token, accepted)

    def step(self, sequences: float, tokens: float) -> float:
        """Seconds of a step whose fullest rank has `sequences`, and whose longest holds `tokens`."""
        lower = int(sequences)
        part = sequences - lower
        rows = (1 - part) * self.curve.step(lower) + (part * self.curve.step(lower + 1) if part else 0.0)
        return rows + self.token * tokens


DECODE = DecodeCost.through(DECODE_POINTS, MEAN_INPUT.value, INDEX_BYTES.value / GPU_READ.value, ACCEPTED.value)
"""Steps of 9.7, 13.9 and 32 ms at 8, 60 and 256 sequences of 77,000 tokens; a token held takes 0.04 ns."""

DECODE_HEAVY = DecodeCost(CostCurve((1, 257), (8.06e-3, 23.42e-3)), 1.2e-9, ACCEPTED.value)
"""A model that reads much more of its cache in a step: 8 ms, 60 us a sequence, 1.2 ns a token held. Assumed."""
