"""The I/O process without its I/O: requests and completions come in, sends and jobs go out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from orchestrator.cache.host.table import HostTable
from orchestrator.cache.io import messages as m
from orchestrator.cache.io.events import (
    Action,
    Event,
    Got,
    Left,
    Load,
    Loaded,
    LoadItem,
    Persist,
    Persisted,
    Probe,
    Probed,
    Send,
    StoreCall,
    Tick,
)
from orchestrator.cache.io.fetch import FetchState
from orchestrator.cache.store.base import Put


@dataclass
class _Client:
    fetches: dict[int, FetchState] = field(default_factory=dict)
    held: dict[int, tuple[float, list[int]]] = field(default_factory=dict)
    reserved: dict[int, tuple[float, dict[int, int]]] = field(default_factory=dict)


class IoCore:
    """Serves engines from the host tier and the store.

    Args:
        max_filling: slots that engines may be filling or waiting to persist at once; more is refused. Loads are not
            counted: they come first.
        hold_s: seconds that an engine may hold fetched blocks or reserved slots. One that hangs longer finds out by
            the slots' generations, so nothing wrong comes of it.
    """

    def __init__(self, table: HostTable, max_filling: int, hold_s: float = 60.0) -> None:
        self.table, self.max_filling, self.hold_s = table, max_filling, hold_s
        self.counters: Counter[str] = Counter()
        self._clients: dict[int, _Client] = {}
        self._loading: dict[bytes, list[tuple[int, int, int]]] = {}
        self._filling = 0

    def step(self, event: Event, now: float) -> list[Action]:
        match event:
            case Got(client, message):
                return self._got(client, message, now)
            case Loaded(item, ok):
                return self._loaded(item, ok, now)
            case Probed(client, id, keys, present, find):
                here = [there or self.table.find(key) is not None for key, there in zip(keys, present, strict=True)]
                if find:
                    return [Send(client, m.Found(id, here.index(True) if True in here else -1))]
                count = here.index(False) if False in here else len(here)
                return [Send(client, m.Matched(id, count))]
            case Persisted():
                return self._persisted(event)
            case Left(client):
                self._left(client)
                return []
            case Tick():
                return self._deadlines(now)

    def next_deadline(self) -> float | None:
        """When a fetch has to be answered, or a hold ends, at the latest."""
        times = [fetch.deadline for client in self._clients.values() for fetch in client.fetches.values()]
        for client in self._clients.values():
            times += [until for until, _ in (*client.held.values(), *client.reserved.values())]
        return min(times, default=None)

    def _got(self, client: int, message: m.Message, now: float) -> list[Action]:
        state = self._clients.setdefault(client, _Client())
        match message:
            case m.Match(id, keys):
                return [Probe(client, id, keys)]
            case m.Find(id, keys):
                return [Probe(client, id, keys, find=True)]
            case m.Fetch():
                return self._fetch(client, state, message, now)
            case m.Release(id):
                fetch = state.fetches.pop(id, None)
                if fetch is not None:
                    self.table.unpin([slot for slot in fetch.slots if slot is not None])
                self.table.unpin(state.held.pop(id, (0.0, []))[1])
                return []
            case m.Reserve(id, count):
                return [Send(client, m.Reserved(id, self._reserve(state, id, count, now)))]
            case m.Commit():
                return self._commit(client, state, message)
            case m.Use() | m.Pin() | m.Unpin():
                return [StoreCall(client, message)]
            case m.Ask(id):
                values = {**self.table.counts, "pinned": self.table.pinned, **self.counters}
                return [Send(client, m.Numbers(id, {name: float(value) for name, value in values.items()}))]
            case _:
                raise ValueError(f"message: got {type(message).__name__}, allowed are requests")

    def _fetch(self, client: int, state: _Client, message: m.Fetch, now: float) -> list[Action]:
        fetch = FetchState(message.keys, now + message.deadline_s)
        state.fetches[message.id] = fetch
        items: list[LoadItem] = []
        missing: list[int] = []
        for number, key in enumerate(message.keys):  # what is here is pinned before anything is evicted for the rest
            slot = self.table.find(key)
            if slot is None:
                missing.append(number)
            else:
                self.table.pin(slot)
                fetch.arrived(number, slot)
        for number in missing:
            key, waiter = message.keys[number], (client, message.id, number)
            if key in self._loading:
                self._loading[key].append(waiter)
                continue
            given = self.table.give()
            if given is None:
                self.counters["fetches_cut_for_room"] += 1
                self.table.unpin(fetch.failed(number))
                break
            parent = message.keys[number - 1] if number else message.parent
            items.append(LoadItem(key, parent, message.depth + number, *given))
            self._loading[key] = [waiter]
        actions: list[Action] = [Load(items)] if items else []
        return actions + self._finish(client, message.id, now)

    def _loaded(self, item: LoadItem, ok: bool, now: float) -> list[Action]:
        waiters = self._loading.pop(item.key, [])
        self.counters["loaded" if ok else "load_misses"] += 1
        if ok:
            slot = self.table.fill(item.slot, item.generation, item.key)
        else:
            self.table.abandon(item.slot, item.generation)
        actions: list[Action] = []
        for client, id, number in waiters:
            state = self._clients.get(client)
            fetch = state.fetches.get(id) if state is not None else None
            if fetch is None:
                continue
            if not ok:
                self.table.unpin(fetch.failed(number))
            elif fetch.arrived(number, slot):
                self.table.pin(slot)
            actions += self._finish(client, id, now)
        return actions

    def _finish(self, client: int, id: int, now: float) -> list[Action]:
        state = self._clients[client]
        fetch = state.fetches[id]
        if not fetch.complete:
            return []
        del state.fetches[id]
        slots = [slot for slot in fetch.slots if slot is not None]
        state.held[id] = (now + self.hold_s, slots)
        return [Send(client, m.Fetched(id, [(slot, self.table.generation(slot)) for slot in slots]))]

    def _deadlines(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for client, state in self._clients.items():
            for id in [id for id, (until, _) in state.held.items() if until <= now]:
                self.counters["holds_ended"] += 1
                self.table.unpin(state.held.pop(id)[1])
            for id in [id for id, (until, _) in state.reserved.items() if until <= now]:
                self.counters["holds_ended"] += 1
                for slot, generation in state.reserved.pop(id)[1].items():
                    self._abandon(slot, generation)
            for id in [id for id, fetch in state.fetches.items() if fetch.deadline <= now]:
                self.counters["fetches_cut_at_deadline"] += 1
                self.table.unpin(state.fetches[id].cut())
                actions += self._finish(client, id, now)
        return actions

    def _reserve(self, state: _Client, id: int, count: int, now: float) -> list[tuple[int, int]]:
        slots: list[tuple[int, int]] = []
        while len(slots) < count and self._filling < self.max_filling and (given := self.table.give()) is not None:
            self._filling += 1
            slots.append(given)
        if len(slots) < count:
            self.counters["inserts_refused"] += count - len(slots)
        state.reserved[id] = (now + self.hold_s, dict(slots))
        return slots

    def _commit(self, client: int, state: _Client, message: m.Commit) -> list[Action]:
        given = state.reserved.pop(message.id, (0.0, {}))[1]
        named = {block.slot: block.generation for block in message.blocks}
        unknown = [slot for slot, generation in named.items() if given.get(slot) != generation]
        for slot, generation in given.items():
            if slot not in named or unknown:
                self._abandon(slot, generation)
        if unknown:
            return [Send(client, m.Committed(message.id, [Put.REFUSED.value] * len(message.blocks)))]
        return [Persist(client, message)]

    def _persisted(self, event: Persisted) -> list[Action]:
        gap = False
        for block, put, whole in zip(event.message.blocks, event.puts, event.whole, strict=True):
            gap = gap or not whole or put is Put.NO_PARENT
            if gap:
                self._abandon(block.slot, block.generation)
            else:
                self._filling -= 1
                self.table.fill(block.slot, block.generation, block.key)
            self.counters[f"put_{put.value}"] += 1
        return [Send(event.client, m.Committed(event.message.id, [put.value for put in event.puts]))]

    def _abandon(self, slot: int, generation: int) -> None:
        self._filling -= 1
        self.table.abandon(slot, generation)

    def _left(self, client: int) -> None:
        state = self._clients.pop(client, None)
        if state is None:
            return
        for _, slots in state.held.values():
            self.table.unpin(slots)
        for fetch in state.fetches.values():
            self.table.unpin([slot for slot in fetch.slots if slot is not None])
        for _, given in state.reserved.values():
            for slot, generation in given.items():
                self._abandon(slot, generation)
