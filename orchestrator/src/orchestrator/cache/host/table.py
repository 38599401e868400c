"""Who may use which slot of the host tier. No bytes, no clock."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class HostTable:
    """Slots are free, filling (given to one writer) or ready; ready ones are pinned, or wait in order of use.

    Slots that nobody pins are given out again, least recently used first, the last of a path before its first.
    """

    def __init__(self, slots: int, first_generation: int = 1) -> None:
        self.slots = slots
        self._generation = first_generation
        self._free = deque(range(slots))
        self._filling: dict[int, int] = {}
        self._ready: dict[int, bytes] = {}
        self._generations: dict[int, int] = {}
        self._by_key: dict[bytes, int] = {}
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def counts(self) -> dict[str, int]:
        """Slots by state; they add up to all slots."""
        return {"free": len(self._free), "filling": len(self._filling), "ready": len(self._ready)}

    @property
    def pinned(self) -> int:
        """Ready slots that somebody holds."""
        return len(self._pins)

    @property
    def available(self) -> int:
        """Slots that `give` can give now."""
        return len(self._free) + len(self._idle)

    def find(self, key: bytes) -> int | None:
        """The slot that holds a key, ready to read."""
        return self._by_key.get(key)

    def generation(self, slot: int) -> int:
        """What the slot's bytes are sealed with."""
        return self._generations[slot]

    def give(self) -> tuple[int, int] | None:
        """A slot to fill and the generation to seal it with; None where all are in use."""
        if self._free:
            slot = self._free.popleft()
        elif self._idle:
            slot, _ = self._idle.popitem(last=False)
            del self._by_key[self._ready.pop(slot)]
        else:
            return None
        self._generation += 1
        self._filling[slot] = self._generations[slot] = self._generation
        return slot, self._generation

    def fill(self, slot: int, generation: int, key: bytes) -> int:
        """A writer is done. Returns the slot that holds the key from now on; another's if that was there first."""
        self._take_back(slot, generation)
        if (other := self._by_key.get(key)) is not None:
            self._free.append(slot)
            return other
        self._ready[slot], self._by_key[key] = key, slot
        self._idle[slot] = None
        return slot

    def abandon(self, slot: int, generation: int) -> None:
        """A writer gave up, or its bytes are wrong."""
        self._take_back(slot, generation)
        self._free.append(slot)

    def is_filling(self, slot: int, generation: int) -> bool:
        return self._filling.get(slot) == generation

    def adopt(self, found: Iterable[tuple[int, bytes, int]]) -> int:
        """Take over (slot, key, generation) of an earlier life, into a table that is still empty. Returns how many."""
        if len(self._free) != self.slots:
            raise ValueError("found: slots are adopted before any is given out")
        for slot, key, generation in found:
            if key not in self._by_key:
                self._ready[slot], self._by_key[key], self._generations[slot] = key, slot, generation
                self._idle[slot] = None
                self._generation = max(self._generation, generation)
        self._free = deque(slot for slot in range(self.slots) if slot not in self._ready)
        return len(self._ready)

    def pin(self, slot: int) -> None:
        """One more reader of a ready slot."""
        if slot not in self._ready:
            raise ValueError(f"slot: got {slot}, allowed are ready ones")
        self._idle.pop(slot, None)
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slots: Sequence[int]) -> None:
        """A reader is done with slots, in the order of its path."""
        for slot in reversed(slots):
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                self._idle[slot] = None

    def _take_back(self, slot: int, generation: int) -> None:
        if self._filling.get(slot) != generation:
            raise ValueError(f"slot: {slot} is not being filled under generation {generation}")
        del self._filling[slot]
