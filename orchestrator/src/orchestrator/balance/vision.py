"""Which encoder takes an image: the one with the fewest patches in work."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_core.check import require


def patches(height: int, width: int, side: int) -> int:
    """Of an image after its resize; `side` pixels a patch."""
    for name, value in (("height", height), ("width", width), ("side", side)):
        require(value > 0, name, value, "1 or more")
    return -(-height // side) * -(-width // side)


@dataclass
class Encoders:
    """Patches in work, by encoder.

    Attributes:
        most: patches that one encoder has in work at most; an idle one takes any image.
    """

    most: int
    work: dict[str, int] = field(default_factory=dict)

    def add(self, encoder: str) -> None:
        self.work.setdefault(encoder, 0)

    def remove(self, encoder: str) -> None:
        """What it had in work goes to others, by calls of `assign`."""
        self.work.pop(encoder, None)

    def assign(self, count: int) -> str | None:
        """The encoder of an image of `count` patches; None while all are full."""
        open_ones = [e for e, work in self.work.items() if work == 0 or work + count <= self.most]
        if not open_ones:
            return None
        encoder = min(open_ones, key=lambda e: (self.work[e], e))
        self.work[encoder] += count
        return encoder

    def done(self, encoder: str, count: int) -> None:
        """Late words of an encoder that was removed change nothing."""
        if encoder in self.work:
            self.work[encoder] = max(0, self.work[encoder] - count)
