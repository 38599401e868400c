"""Blocks of chains in stripes of ten and two shards over simulated disks.

Index, collector, leases, code, shard headers and the rule of whom to ask are those of `orchestrator.cache`; only the
disks and the time are simulated. What the store gives back is right or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from orchestrator.cache.block_object import WrongBytes
from orchestrator.cache.erasure import code
from orchestrator.cache.erasure.placement import place
from orchestrator.cache.erasure.read import Ask, Bad, Came, Done, Down, Fail, Start, StripeRead
from orchestrator.cache.erasure.shard import STRIPE_BLOCKS, Stripe, name, open_shard, seal, verify
from orchestrator.cache.gc import Collector, FreeBytes, Lost, Tick
from orchestrator.cache.index import BlockIndex, Publish
from orchestrator.cache.leases import Leases
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.simulate.store.disk import Disk, DiskFull

LAYOUT = b"toy rows, 4 bytes a token".ljust(32, b"\0")
_DURABLE = code.SHARDS - 1
"""Shards that must be written before a stripe is visible."""


class Unavailable(ConnectionError):
    """The store's metadata do not answer."""


@dataclass(frozen=True)
class StoredBlock:
    """A full block of a chain: its key, the key before it, its number in the chain, its rows."""

    key: bytes
    parent: bytes
    depth: int
    data: bytes


@dataclass
class _Held:
    stripe: Stripe
    targets: list[str]
    live: int


class SharedStore:
    """One store of the service.

    Args:
        disks: twelve or more. block_bytes: of every block. capacity: bytes of visible blocks at most.

    Attributes:
        up: whether metadata answer. counts: "stored", "already", "refused", "read", "missed", "bad shards", "gone".
    """

    def __init__(self, disks: Sequence[Disk], block_bytes: int, capacity: int, policy: RetentionPolicy) -> None:
        if len(disks) < code.SHARDS:
            raise ValueError(f"disks: got {len(disks)}, allowed are {code.SHARDS} or more")
        self.disks = {disk.name: disk for disk in disks}
        self.up, self.counts = True, Counter[str]()
        self.policy, self.capacity, self.block_bytes = policy, capacity, block_bytes
        self._stripes: dict[int, _Held] = {}
        self._number = 0
        self._fresh()

    def _fresh(self) -> None:
        self.index = BlockIndex(self.policy)
        self.leases = Leases(self.index)
        self.collector = Collector(self.index, self.capacity, self.leases)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are visible. Changes nothing."""
        self._need_up()
        return self.index.match(keys)

    def write(self, blocks: Sequence[StoredBlock], root: bytes, tenant: str, now: float) -> int:
        """Store blocks that follow each other in a chain; those that are there already are passed over.

        Returns how many of the first blocks are visible now. A disk's refusal or silence makes a stripe fail, never
        the request that wrote it.
        """
        self._need_up()
        done = 0
        for block in blocks:
            if block.key not in self.index:
                break
            done += 1
            self.counts["already"] += 1
        for start in range(done, len(blocks), STRIPE_BLOCKS):
            run = blocks[start : start + STRIPE_BLOCKS]
            if not self._write_stripe(run, root, tenant, now):
                self.counts["refused"] += len(run)
                break
            done += len(run)
        return done

    def _write_stripe(self, run: Sequence[StoredBlock], root: bytes, tenant: str, now: float) -> bool:
        parent = run[0].parent
        if parent != root and parent not in self.index:
            return False
        self._number += 1
        generation = self.index.next_generation()
        keys = tuple(block.key for block in run)
        stripe = Stripe(self._number, generation, LAYOUT, parent, run[0].depth, self.block_bytes, keys)
        open_disks = {disk.name: disk.name for disk in self.disks.values() if disk.up and not disk.full}
        if len(open_disks) < code.SHARDS:
            return False
        targets = place(stripe.number, open_disks)
        bodies = code.encode(b"".join(block.data for block in run))
        durable = 0
        for number, target in enumerate(targets):
            try:
                self.disks[target].write(name(stripe.number, number), seal(stripe, number, bodies[number]))
                durable += 1
            except (DiskFull, ConnectionError):
                continue
        if durable < _DURABLE:
            self._delete(stripe.number, targets)
            return False
        self._stripes[stripe.number] = _Held(stripe, targets, len(run))
        for number, block in enumerate(run):
            published = self.index.publish(
                block.key, block.parent, self.block_bytes, now, root=root, tenant=tenant,
                place=(stripe.number, number), generation=generation,
            )  # fmt: skip
            assert published is Publish.NEW, published
        self.counts["stored"] += len(run)
        return True

    def begin_read(self, keys: Sequence[bytes], until: float, holder: str) -> tuple[int, list[int]] | None:
        """Lease a path for reading it. Returns the lease and the blocks' generations; None where it is not whole."""
        self._need_up()
        lease = self.leases.take(keys, until, holder)
        if lease is None:
            return None
        found = [self.index.get(key) for key in keys]
        return lease, [entry.generation for entry in found if entry is not None]

    def end_read(self, keys: Sequence[bytes], lease: int, generations: Sequence[int], now: float) -> list[bytes | None]:
        """What the disks gave for the keys, by now. A block that went or was written anew meanwhile is None."""
        self._need_up()
        result: list[bytes | None] = []
        stripes: dict[int, bytes | None] = {}
        for key, generation in zip(keys, generations, strict=True):
            entry = self.index.get(key)
            if entry is None or entry.generation != generation:
                result.append(None)
                continue
            number, at = entry.place
            if number not in stripes:
                stripes[number] = self._read_stripe(number, now)
            data = stripes[number]
            result.append(None if data is None else data[at * self.block_bytes : (at + 1) * self.block_bytes])
        self.leases.give(lease)
        whole = next((n for n, data in enumerate(result) if data is None), len(result))
        if whole:
            self.index.use(keys[:whole], now, Retention.AGENT)
        self.counts["read"] += whole
        self.counts["missed"] += len(keys) - whole
        return result

    def collect(self, now: float) -> None:
        """Expiry, watermark, and bytes whose grace is over."""
        if self.up:
            self._follow(self.collector.step(Tick(), now))

    def restart(self, now: float) -> None:
        """The metadata server comes back without memory: the index is made again from the shards' own headers."""
        self.up = True
        self._stripes.clear()
        self._fresh()
        found: dict[int, tuple[Stripe, dict[int, str]]] = {}
        for disk in self.disks.values():
            for label, data in disk.shards.items() if disk.up else ():
                try:
                    stripe, shard, _ = open_shard(data)
                except WrongBytes:
                    continue
                if name(stripe.number, shard) == label:  # else it lies where another belongs
                    found.setdefault(stripe.number, (stripe, {}))[1][shard] = disk.name
        for number in sorted(found, key=lambda n: (found[n][0].depth, n)):
            stripe, shards = found[number]
            self._number = max(self._number, number)
            if len(shards) >= code.DATA:
                self._adopt(stripe, shards, now)

    def _adopt(self, stripe: Stripe, shards: dict[int, str], now: float) -> None:
        root = b"" if stripe.depth else stripe.parent
        live, parent = 0, stripe.parent
        for at, key in enumerate(stripe.keys):
            published = self.index.publish(
                key, parent, self.block_bytes, now, root=root, place=(stripe.number, at), generation=stripe.generation
            )
            live += published is Publish.NEW
            parent = key
        if live:
            absent = next(iter(self.disks))  # any disk: it has no shard of this name, so a read finds that out
            self._stripes[stripe.number] = _Held(stripe, [shards.get(n, absent) for n in range(code.SHARDS)], live)

    def _read_stripe(self, number: int, now: float) -> bytes | None:
        held = self._stripes.get(number)
        if held is None:
            return None
        stripe, bodies = held.stripe, dict[int, bytes]()
        read = StripeRead((), 0.0)
        waiting = read.step(Start(), now)
        while waiting:
            action = waiting.pop(0)
            if isinstance(action, Done):
                return code.decode(bodies, stripe.size)
            if isinstance(action, Fail):
                if action.lost:
                    for key in stripe.keys:
                        entry = self.index.get(key)
                        if entry is not None and entry.place[0] == number:
                            self._follow(self.collector.step(Lost(key), now))
                return None
            assert isinstance(action, Ask)
            for shard in action.shards:
                waiting += read.step(self._ask(held, shard, bodies), now)
        return None

    def _ask(self, held: _Held, shard: int, bodies: dict[int, bytes]) -> Came | Bad | Down:
        try:
            data = self.disks[held.targets[shard]].read(name(held.stripe.number, shard))
            if data is None:
                return Bad(shard)
            bodies[shard] = verify(data, held.stripe, shard)
        except ConnectionError:
            return Down(shard)
        except WrongBytes:
            self.counts["bad shards"] += 1
            return Bad(shard)
        return Came(shard)

    def _follow(self, actions: Sequence[object]) -> None:
        for action in actions:
            if isinstance(action, FreeBytes):
                for _, _, (number, _) in action.places:
                    self.counts["gone"] += 1
                    held = self._stripes.get(number)
                    if held is not None:
                        held.live -= 1
                        if held.live == 0:
                            del self._stripes[number]
                            self._delete(number, held.targets)

    def _delete(self, number: int, targets: Sequence[str]) -> None:
        for shard, target in enumerate(targets):
            self.disks[target].shards.pop(name(number, shard), None)

    def _need_up(self) -> None:
        if not self.up:
            raise Unavailable("the store does not answer")


def make_disks(count: int, random: Random) -> list[Disk]:
    """Disks "disk0", "disk1", and so on, with one stream of faults."""
    return [Disk(f"disk{n}", random) for n in range(count)]
