"""A thread that sleeps until a transfer's events have passed, then tells the transfer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gdr_swapin.transfer import Transfer


@dataclass(frozen=True)
class Watched:
    """events: (position, event) of the layers that were queued. last: passes when nothing of the transfer is left.
    held: called then, in any case."""

    transfer: Transfer
    events: Sequence[tuple[int, Any]]
    last: Any
    held: Sequence[Callable[[], None]]


class Watcher:
    """Transfers in the order in which they were queued, as the streams are."""

    def __init__(self, enter: Callable[[], None]) -> None:
        self._enter = enter
        self._items: queue.SimpleQueue[Watched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="swapin-events", daemon=True)
        self._thread.start()

    def watch(self, item: Watched) -> None:
        self._items.put(item)

    def close(self) -> None:
        """Returns when everything watched has ended."""
        self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._enter()
        while (item := self._items.get()) is not None:
            position = 0
            try:
                for position, event in item.events:
                    event.synchronize()
                    item.transfer.loaded(position)
                item.last.synchronize()
            except Exception as error:  # of the device; it is then lost to this process
                item.transfer.failed(position, f"{type(error).__name__}: {error}")
            for give_back in item.held:
                give_back()
            item.transfer.end()
