"""Links between the machines: delay, loss, duplicates, reordering, one-way partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import log
from random import Random
from typing import Any

from msgspec import structs

from orchestrator.simulate.queue import EventQueue


@dataclass(frozen=True)
class LinkQuality:
    """What happens to a message on a link.

    Attributes:
        delay: seconds at least. jitter: mean of what comes on top, exponentially spread, so messages pass each other.
        loss, twice: chances that a message vanishes, and that it comes twice.
        late: chance that a message takes up to `hold` seconds more (a retransmission, a full queue).
        spoilt: chance that a payload comes with a wrong bit, or short, and nobody on the way notices.
    """

    delay: float = 0.0005
    jitter: float = 0.0005
    loss: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    hold: float = 0.5
    spoilt: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delay", "jitter", "hold"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed are seconds of 0 or more")
        for name in ("loss", "twice", "late", "spoilt"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed are chances from 0 to 1")


HEALTHY = LinkQuality()


class Network:
    """All links; each direction of a pair is a link of its own.

    Args:
        deliver: called with sender, receiver and message when one arrives. What runs there by then is its business.
        healthy: links as they are when nothing is wrong; only `delay` and `jitter` count.

    Attributes:
        quality: of links that have no quality of their own. healthy: what it is when nothing is wrong.
        counts: "sent", "lost", "doubled", "late", "cut", "spoilt".
    """

    def __init__(
        self,
        queue: EventQueue,
        random: Random,
        deliver: Callable[[str, str, Any], None],
        healthy: LinkQuality = HEALTHY,
    ) -> None:
        self.quality = self.healthy = healthy
        self.counts: Counter[str] = Counter()
        self._queue, self._random, self._deliver = queue, random, deliver
        self._links: dict[tuple[str, str], LinkQuality] = {}
        self._cut: Counter[tuple[str, str]] = Counter()

    def send(self, source: str, target: str, message: Any) -> None:
        """A message to oneself arrives without passing a link, after what is running."""
        if source == target:
            self._queue.at(self._queue.now, self._deliver, source, target, message)
            return
        self.counts["sent"] += 1
        if self._cut and (source, target) in self._cut:
            self.counts["cut"] += 1
            return
        quality = self._links.get((source, target), self.quality) if self._links else self.quality
        random = self._random
        if quality is self.healthy:
            delay = quality.delay - quality.jitter * _log1p_draw(random)
            self._queue.at(self._queue.now + delay, self._deliver, source, target, message)
            return
        if random.random() < quality.loss:
            self.counts["lost"] += 1
            return
        if quality.spoilt and random.random() < quality.spoilt and getattr(message, "payload", None):
            self.counts["spoilt"] += 1
            message = structs.replace(message, payload=_spoil(message.payload, random))
        copies = 1 + (random.random() < quality.twice)
        self.counts["doubled"] += copies - 1
        for _ in range(copies):
            delay = quality.delay - quality.jitter * _log1p_draw(random)
            if random.random() < quality.late:
                self.counts["late"] += 1
                delay += random.random() * quality.hold
            self._queue.at(self._queue.now + delay, self._deliver, source, target, message)

    def set_quality(self, source: str, target: str, quality: LinkQuality | None) -> None:
        """One direction of a pair; None gives it the common quality again."""
        if quality is None:
            self._links.pop((source, target), None)
        else:
            self._links[source, target] = quality

    def cut(self, source: str, target: str) -> None:
        """Nothing passes in this direction until as many calls of `join` as of `cut` were made."""
        self._cut[source, target] += 1

    def join(self, source: str, target: str) -> None:
        self._cut[source, target] -= 1
        if self._cut[source, target] <= 0:
            del self._cut[source, target]

    def heal(self) -> None:
        """All links as new."""
        self.quality = self.healthy
        self._links.clear()
        self._cut.clear()


def _spoil(payload: bytes, random: Random) -> bytes:
    if random.random() < 0.3:
        return payload[: random.randrange(len(payload))]
    changed = bytearray(payload)
    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _log1p_draw(random: Random) -> float:
    """log of a number in (0, 1]: minus an exponential draw of mean 1."""
    return log(1.0 - random.random())
