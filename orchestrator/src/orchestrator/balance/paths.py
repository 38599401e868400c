"""Which prefill engine takes a request whose prefix is in the store, and which side reads it (after DualPath).

A read may go through the prefill node's network card or the decode node's; the queue of each is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kernel_core.check import require

Side = Literal["prefill", "decode"]


@dataclass(frozen=True)
class PrefillLoad:
    """tokens: waiting or running on the engine. node: whose network card reads for it."""

    name: str
    tokens: int
    node: str


@dataclass(frozen=True)
class PathSettings:
    """Attributes:
    busy: tokens on an engine from which it takes no more (what it computes in 5 s).
    slow: tokens waiting at a node's network card from which others are preferred (what it reads in 3 s).
    gain: tokens by which the decode side's queue has to be shorter before it reads; the prefill side is the default.
    """

    busy: int
    slow: int
    gain: int = 65_536

    def __post_init__(self) -> None:
        for name in ("busy", "slow"):
            require(getattr(self, name) > 0, name, getattr(self, name), "1 or more")
        require(self.gain >= 0, "gain", self.gain, "0 or more")


def choose_prefill(
    engines: Sequence[PrefillLoad], reading: Mapping[str, int], settings: PathSettings
) -> PrefillLoad | None:
    """The engine with fewest tokens among those whose node reads little, else among the others; None if all are busy.

    reading: tokens waiting at each node's network card.
    """
    able = [e for e in engines if e.tokens <= settings.busy]
    quick = [e for e in able if reading.get(e.node, 0) <= settings.slow]
    return min(quick or able, key=lambda e: (e.tokens, e.name), default=None)


def choose_side(prefill_queue: int, decode_queue: int, settings: PathSettings) -> Side:
    """The side that reads, from the tokens that wait at each node's network card."""
    return "decode" if prefill_queue - decode_queue > settings.gain else "prefill"


def balanced_ratio(gpus: int, storage: float, memory: float) -> tuple[float, float]:
    """Prefill to decode nodes between which neither kind's links hold up the other, least and most.

    Args:
        gpus: of a node, each with a network card of its own.
        storage: bandwidth of a node's storage network over that of a GPU's card.
        memory: bandwidth of a node's memory over that of its storage network.
    """
    require(0 < storage < gpus / 2, "storage", storage, f"above 0, below {gpus / 2}")
    least = storage / (gpus - storage)
    most = min((gpus - 2 * storage) / storage, (gpus - storage) / (2 * storage), (memory - 3) / 2)
    return least, most
