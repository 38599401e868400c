"""A toy engine on its own, driven as a core would."""

from __future__ import annotations

from random import Random

from orchestrator.cache.retention import RetentionPolicy
from orchestrator.roles import engine_port as port
from orchestrator.roles.messages import RequestSpec
from orchestrator.simulate.queue import EventQueue
from orchestrator.simulate.store import SharedStore, make_disks
from orchestrator.simulate.toy.cells import BLOCK_BYTES
from orchestrator.simulate.toy.decode import DecodeEngine
from orchestrator.simulate.toy.engine import EngineShape, Site
from orchestrator.simulate.toy.prefill import PrefillEngine
from orchestrator.simulate.toy.reference import Reference
from orchestrator.simulate.toy.text import embedding, salt_of


class Seen:
    """Checks that only write down."""

    def __init__(self):
        self.blocks, self.wrongs = [], []

    def block_read(self, engine, key, data, right):
        self.blocks.append(data == right)

    def wrong(self, invariant, what):
        self.wrongs.append((invariant, what))


class Bench:
    """Engines side by side over one store. `ask` gives a command and runs until its answer has come."""

    def __init__(self, seed=0):
        self.queue = EventQueue(Random(seed))
        self.store = SharedStore(make_disks(12, Random(seed)), BLOCK_BYTES, 1000 * BLOCK_BYTES, RetentionPolicy())
        self.checks = Seen()
        self.site = Site(self.queue, self.store, self.checks, Random(seed))
        self.said: dict[str, list] = {}
        self.step = 0

    def prefill(self, name="p", **shape):
        return PrefillEngine(name, EngineShape(**shape), self.site, self.said.setdefault(name, []).append)

    def decode(self, name="d", **shape):
        return DecodeEngine(name, EngineShape(**shape), self.site, self.said.setdefault(name, []).append)

    def drain(self):
        while self.queue.step():
            pass

    def ask(self, engine, command):
        said = self.said[engine.name]
        said.clear()
        engine.do(command)
        assert not said, "an answer came while the command was given"
        self.drain()
        return said[0] if said else None

    def take_in(self, engine, key, spec, output=(), chunk=100):
        """Begin and all chunks. Returns what `Began` said, and the last `PrefillDone`."""
        images = tuple((image.digest, embedding(image.digest)) for image in spec.images)
        began = self.ask(engine, port.Begin(*key, spec, tuple(output), "prefill", images))
        if began.why:
            return began, None
        at, end, done = began.computed, len(spec.prompt) + len(output), None
        while at < end:
            count = min(chunk, end - at)
            self.step += 1
            piece = port.PrefillChunk(*key, 0, at, count, at + count == end)
            done = self.ask(engine, port.RunPrefill(self.step, (piece,)))
            at += count
        return began, done

    def hand_over(self, source, target, key, spec):
        exported = self.ask(source, port.Export(*key))
        return exported, self.ask(target, port.Load(*key, spec, exported.manifest, exported.parts))

    def run(self, engine, *keys):
        self.step += 1
        return self.ask(engine, port.RunDecode(self.step, keys))


def right(spec, stop_after=None):
    """The reference's tokens."""
    salt = salt_of(spec.tenant, [embedding(image.digest) for image in spec.images])
    reference = Reference(
        spec.prompt, seed=spec.seed, salt=salt, grammar=spec.grammar, most=spec.max_tokens, stop_after=stop_after
    )
    return [reference.token(n) for n in range(reference.length)]


def spec(length=300, most=20, *, stop=None, **fields):
    params = b"" if stop is None else b"%d" % stop
    return RequestSpec(tuple(range(10, 10 + length)), most, params=params, **fields)
