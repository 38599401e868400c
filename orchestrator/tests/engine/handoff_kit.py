"""Engines that hand requests to each other, and parts with what a test does to them."""

from __future__ import annotations

import google_crc32c
import msgspec
import pytest

from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.handoff.messages import Listed, Manifest, Offer, decode, encode
from orchestrator.engine.handoff.parts import FORMAT, HandoffRefused, handoff_of, open_part, seal_part
from orchestrator.engine.request import Ready, SamplingParams, TokenOutput

LONGEST = 5000  # steps


def poison(engine):
    """What nobody holds must not be read, and must not leave."""
    for tail in engine.cache.tails.values():
        tail.fill_(float("nan"))
    engine.cache.rings.fill_(0x7F)
    for pool in engine.cache.pools.values():
        pool.main.fill_(0x7F)
        pool.index.fill_(0x7F)


def params(seed, **options):
    return SamplingParams(**{"seed": seed, "max_tokens": 30, "ignore_eos": True} | options)


def tokens_of(events):
    return [event.token_id for event in events if isinstance(event, TokenOutput)]


class Pair:
    """Engines with a door each, and what their requests have given out so far, whoever computed it."""

    def __init__(self, kit, model, tokenizer=None, count=2, **options):
        self.engines = [kit.engine_of(model, tokenizer, **options) for _ in range(count)]
        for engine in self.engines:
            poison(engine)
        self.doors = [Handoffs(engine) for engine in self.engines]
        self.kept = 0
        self.tokens, self.logprobs, self.texts, self.ends, self.readies = {}, {}, {}, {}, {}

    def step(self, number=None):
        for engine in self.engines if number is None else [self.engines[number]]:
            self.note(engine.step())

    def note(self, events):
        for event in events:
            name = event.request_id
            assert name not in self.ends, f"{event} after its end"
            if isinstance(event, Ready):
                self.readies[name] = self.readies.get(name, 0) + 1
            elif isinstance(event, TokenOutput):
                self.tokens.setdefault(name, []).append(event.token_id)
                self.logprobs.setdefault(name, []).append(event.logprob)
                self.texts[name] = self.texts.get(name, "") + event.text
            else:
                self.ends[name] = event
                self.texts[name] = self.texts.get(name, "") + event.text

    def move(self, name, source, target, form="full"):
        """False where the request has ended meanwhile, or the other engine has no room and it goes on where it was."""
        if self.engines[source].find(name) is None:
            return False
        try:
            parts = self.doors[source].give(name, form)
        except HandoffRefused as error:  # ended with the step in flight
            assert error.reason == "ended"
            return False
        self.note(self.engines[source].take_events())
        try:
            self.doors[target].take(parts)
        except HandoffRefused as error:
            assert error.reason == "room"
            assert self.doors[source].conclude(name, taken=False)
            self.kept += 1
            return False
        self.note(self.engines[target].take_events())
        assert self.doors[source].conclude(name, taken=True)
        return True

    def finish(self):
        for _ in range(LONGEST):
            if not any(engine.has_work for engine in self.engines):
                break
            self.step()
        self.baseline()
        assert all(count == 1 for count in self.readies.values())
        return {
            name: (self.tokens.get(name, []), self.logprobs.get(name, []), self.texts.get(name, ""), end)
            for name, end in self.ends.items()
        }

    def baseline(self):
        for engine in self.engines:
            scheduler = engine.scheduler
            assert scheduler.blocks.used == scheduler.slots.used == 0
            assert (
                scheduler.blocks.free == scheduler.blocks.capacity and scheduler.slots.free == scheduler.slots.capacity
            )
            assert not (scheduler.leaving or scheduler.running or scheduler.parked or scheduler.waiting)
            assert not engine._sequences and not engine._leavers


def parts_of(kit, model, form="full", *, length=150, steps=2, tokenizer=None, setting=None, **options):
    """A request's parts, in the midst of its answer, by an engine of the same model."""
    engine = kit.engine_of(model, tokenizer, speculation=3, **options)
    engine.add("r", kit.prompt_of(length, 1), setting or params(1))
    for _ in range(steps):
        engine.step()
    return Handoffs(engine).give("r", form)


class Watched:
    """A receiver in the midst of other work; `unchanged` holds what it has and does to what it had and did."""

    def __init__(self, kit, model, tokenizer=None, **options):
        self.engine = kit.engine_of(model, tokenizer, speculation=3, **options)
        self.door = Handoffs(self.engine)
        self.requests = {str(i): (kit.prompt_of(60 + 70 * i, 20 + i), params(20 + i, max_tokens=12)) for i in range(2)}
        self.expected = kit.run(kit.engine_of(model, tokenizer, speculation="off"), self.requests)
        for name, request in self.requests.items():
            self.engine.add(name, *request)
        self.tokens = {name: [] for name in self.requests}
        self.step()
        self.step()
        self.before = self.state()

    def step(self):
        for event in self.engine.step():
            if isinstance(event, TokenOutput):
                self.tokens[event.request_id].append(event.token_id)

    def state(self):
        scheduler = self.engine.scheduler
        running = [(s.request_id, list(s.blocks), s.slot, len(s.tokens), s.state) for s in scheduler.running]
        held = [block for s in scheduler.running for block in s.blocks]
        rows = [t.numpy().tobytes() for pair in self.engine.cache.save_blocks(held).values() for t in pair]
        slots = [self.engine.cache.save_slot(s.slot).rings.numpy().tobytes() for s in scheduler.running]
        counts = (scheduler.blocks.used, scheduler.slots.used, len(scheduler.waiting), len(scheduler.leaving))
        return running, rows, slots, counts, sorted(self.engine._sequences), self.engine.has_work

    def unchanged(self):
        assert self.state() == self.before

    def finish(self):
        while self.engine.has_work:
            self.step()
        assert self.tokens == {name: outcome[0] for name, outcome in self.expected.items()}
        assert self.engine.scheduler.blocks.used == self.engine.scheduler.slots.used == 0

    def refuses(self, parts, *reasons):
        with pytest.raises(HandoffRefused) as error:
            self.door.take(parts)
        assert not reasons or error.value.reason in reasons, error.value
        assert self.door.counts[error.value.reason] > 0
        self.unchanged()


def flipped(data, bit):
    return data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :]


def resealed(parts, watched, **changes):
    """Parts with another message in the place of some, and all that follows from it: only its contents are wrong."""
    offer = decode(open_part(FORMAT, handoff_of(parts[0][1]), 0, *parts[0]), Offer)
    sealed, listed = [], []
    for name, data in parts:
        number = len(sealed)
        tag = FORMAT if name == "offer" else watched.door.layout
        payload = open_part(tag, offer.handoff, number, name, data)
        if name in changes:
            payload = changes[name](payload)
        if name == "manifest" and "manifest" not in changes:
            payload = encode(Manifest(listed))
        sealed.append(seal_part(tag, offer.handoff, number, name, payload))
        listed.append(Listed(name, len(sealed[-1].data), google_crc32c.value(sealed[-1].data)))
    return sealed


def changed(kind, **fields):
    return lambda payload: encode(msgspec.structs.replace(decode(payload, kind), **fields))
