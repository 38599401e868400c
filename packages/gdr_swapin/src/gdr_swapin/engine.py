"""What a way to move blocks has to offer to the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gdr_swapin.transfer import Transfer


@dataclass(frozen=True)
class Job:
    """A checked request. `slots`, `blocks`: `int64[n]`, in an order that suits the copies.

    fences: what has to be over before the first byte is written (the users of the blocks until now). store: the way
    back, from the pools into the arena.
    """

    transfer: Transfer
    slots: np.ndarray
    blocks: np.ndarray
    fences: tuple[Any, ...] = ()
    store: bool = False


class Engine(Protocol):
    """Moves the layers of a job one after the other and tells the transfer what became of each."""

    name: str
    stores: bool  # whether it takes the way back
    transfer_type: type[Transfer]

    def fences(self, after: Any) -> tuple[Any, ...]:
        """What `start(after=...)` names, checked; None means what is safe here."""
        ...

    def submit(self, job: Job) -> None:
        """Queue a job. Raises before anything of it is queued, or never."""
        ...

    def close(self) -> None:
        """Wait for everything queued and free what the engine holds."""
        ...


def host_fences(after: Any) -> tuple[Any, ...]:
    """Futures, events with `wait(timeout)`, and callables that take a time-out in seconds and say if it is over."""
    if after is None:
        return ()
    items = tuple(after) if isinstance(after, Iterable) else (after,)
    for item in items:
        if not (isinstance(item, Future) or callable(getattr(item, "wait", None)) or callable(item)):
            raise ValueError(f"after: got {type(item).__name__}, allowed are futures, events and callables")
    return items


def pass_fence(fence: Any, timeout: float) -> None:
    """Wait for one of `host_fences`; raises what it raises, or TimeoutError."""
    if isinstance(fence, Future):
        fence.result(timeout)
        return
    wait: Callable[[float], Any] = fence.wait if callable(getattr(fence, "wait", None)) else fence
    if wait(timeout) is False:
        raise TimeoutError(f"a user of the blocks was not over after {timeout:g} s")
