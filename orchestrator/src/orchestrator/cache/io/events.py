"""What happens to the I/O process, and what its core wants done."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.cache.io import messages as m
from orchestrator.cache.store.base import Put


@dataclass(frozen=True)
class Left:
    """An engine is gone: whatever it held or was filling is free."""

    client: int


@dataclass(frozen=True)
class Got:
    """A request of an engine."""

    client: int
    message: m.Message


@dataclass(frozen=True)
class LoadItem:
    """A block to read from the store into a slot."""

    key: bytes
    parent: bytes
    depth: int
    slot: int
    generation: int


@dataclass(frozen=True)
class Loaded:
    """A `Load` ended for one block; `ok` only if the slot holds its verified bytes."""

    item: LoadItem
    ok: bool


@dataclass(frozen=True)
class Probed:
    """The store's answer to a `Probe`."""

    client: int
    id: int
    keys: list[bytes]
    present: list[bool]
    find: bool = False


@dataclass(frozen=True)
class Persisted:
    """The store's answer to a `Persist`. `whole[i]`: the slot's bytes answered for themselves."""

    client: int
    message: m.Commit
    puts: list[Put]
    whole: list[bool]


@dataclass(frozen=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True)
class Send:
    client: int
    message: m.Message


@dataclass(frozen=True)
class Probe:
    """Which of these keys are there? `find`: asked for the first that is, not for how many first ones are."""

    client: int
    id: int
    keys: list[bytes]
    find: bool = False


@dataclass(frozen=True)
class Load:
    items: list[LoadItem]


@dataclass(frozen=True)
class Persist:
    client: int
    message: m.Commit


@dataclass(frozen=True)
class StoreCall:
    """A use, pin or unpin: nothing waits for the first and last."""

    client: int
    message: m.Use | m.Pin | m.Unpin


Event = Left | Got | Loaded | Probed | Persisted | Tick
Action = Send | Probe | Load | Persist | StoreCall
