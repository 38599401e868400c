"""Memory that steps on the device may still touch is not free yet."""

from __future__ import annotations

from orchestrator.engine.pool import IdPool


class Fence:
    """Numbers of the last step launched and of the last one known to have ended on the device.

    `kept` False leaves rule H2 out: frees take effect at once.
    """

    def __init__(self, *, kept: bool = True) -> None:
        self.launched = self.done = 0
        self.kept = kept

    @property
    def open(self) -> bool:
        return self.kept and self.launched > self.done


class FencedPool(IdPool):
    """An `IdPool` whose frees take effect when the last step that may touch the ids has ended (rule H2).

    `free` counts what can be handed out now; `fenced` are ids given back too early to be among them.
    """

    def __init__(self, size: int, what: str, fence: Fence) -> None:
        super().__init__(size, what)
        self.fence = fence
        self._held: list[tuple[int, list[int]]] = []

    @property
    def fenced(self) -> int:
        return sum(len(ids) for _, ids in self._held)

    def give(self, ids: list[int]) -> None:
        if self.fence.open and ids:
            self._held.append((self.fence.launched, list(ids)))
        else:
            super().give(ids)

    def reclaim(self) -> None:
        """Free what waited for steps that have ended."""
        ended = [ids for step, ids in self._held if step <= self.fence.done]
        self._held = [entry for entry in self._held if entry[0] > self.fence.done]
        for ids in ended:
            super().give(ids)
