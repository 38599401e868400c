"""A step that ends in an error anywhere is taken back: requests go on with the tokens and bits of no error at all."""

from __future__ import annotations

import random

import pytest

from orchestrator.engine.lockstep import Lockstep
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.model.transformer import Transformer


class Lost(Exception):
    """What a link to other ranks would raise."""


class Link:
    """Stands in a layer's way: breaks at the n-th passage of a kind, and stays broken until it is mended."""

    def __init__(self, kind, at):
        self.kind, self.left, self.broken = kind, at, False

    def around(self, kind, work):
        def passed(*args, **options):
            if kind == self.kind:
                self.left -= 1
                self.broken = self.broken or self.left == -1
            if self.broken:
                raise Lost(kind)
            return work(*args, **options)

        passed.parallel = None
        return passed


class Alone:
    def any(self, mine):
        return mine


def engine_with(kit, model, link, mode, known, right, **options):
    engine = kit.engine_of(Transformer(model.weights, model.tables), mode=mode, **options)
    engine.lockstep = Lockstep(Alone())
    moes = engine.model.moe
    engine.model.moe = [link.around(layer, moe) for layer, moe in enumerate(moes)]
    if engine.speculator is not None:
        kit.tutor(engine, known, lambda seed, position: right)
        drafter = engine.speculator.drafter
        drafter.block = link.around("draft", drafter.block)
    return engine


def run(engine, link, requests):
    """Tokens and log-probabilities of every request, and how many errors there were."""
    for name, (prompt, params) in requests.items():
        engine.add(name, list(prompt), params)
    heard, errors = {name: [] for name in requests}, 0
    engine.lockstep.agree(True)
    while engine.has_work:
        try:
            events = engine.step()
        except Lost:
            errors += 1
            engine.settle()
            link.broken = False
            engine.lockstep.agree(True)
            events = engine.take_events()
        for event in events:
            if isinstance(event, TokenOutput):
                heard[event.request_id].append((event.token_id, event.logprob))
            assert not isinstance(event, Finished) or event.reason == "length"
    assert engine.scheduler.blocks.used == engine.scheduler.slots.used == 0
    return heard, errors


@pytest.fixture(scope="module")
def requests(kit):
    return {
        str(i): (kit.prompt_of(n, i), SamplingParams(seed=i, max_tokens=24, ignore_eos=True, logprobs=0))
        for i, n in enumerate((5, 90, 33))
    }


@pytest.fixture(scope="module")
def expected(kit, nano, requests):
    done = kit.run(kit.engine_of(nano, speculation="off"), requests)
    return {name: list(zip(tokens, logprobs, strict=True)) for name, (tokens, logprobs, _, _) in done.items()}


def settled(kit, nano, requests, expected, mode, kind, at, right, **options):
    known = {i: [*requests[str(i)][0], *(token for token, _ in expected[str(i)])] for i in range(3)}
    link = Link(kind, at)
    engine = engine_with(kit, nano, link, mode, known, right, chunk_tokens=40, **options)
    heard, errors = run(engine, link, requests)
    if engine.pipeline is not None:
        engine.pipeline.launcher.close()
    return heard == expected, errors


@pytest.mark.parametrize("mode", ["alone", "in order", "worker"])
@pytest.mark.parametrize("kind", [0, 7, "draft"])
def test_nothing_is_lost_and_no_bit_changes(kit, nano, requests, expected, mode, kind):
    """Passages are counted by step, prompts first; all drafts are right, so that steps advance as far as they can."""
    for at in (1, 4, 5):
        assert settled(kit, nano, requests, expected, mode, kind, at, right=5) == (True, 1)


@pytest.mark.parametrize(
    ("mode", "kind", "at", "without"),
    [
        ("alone", 7, 1, "orchestrator.engine.undo.Undo.keep"),  # rings that a chunk of a prompt has overwritten
        ("worker", "draft", 5, "orchestrator.engine.flight.Flight.appended"),  # tokens whose drafts failed
    ],
)
def test_both_halves_are_needed(kit, nano, requests, expected, monkeypatch, mode, kind, at, without):
    nothing = (lambda self, work: None) if without.endswith("keep") else property(lambda self: False, lambda *_: None)
    monkeypatch.setattr(without, nothing)
    assert settled(kit, nano, requests, expected, mode, kind, at, right=5) == (False, 1)


@pytest.mark.parametrize("seed", range(6))
def test_at_drawn_points(kit, nano, requests, expected, seed):
    rng = random.Random(seed)
    mode, kind = rng.choice(["alone", "in order", "worker"]), rng.choice([*range(12), "draft"])
    options = rng.choice([{}, {"num_blocks": 3}, {"prefix_cache": "exact"}, {"speculation": "off"}])
    if kind == "draft" and options.get("speculation") == "off":
        kind = 3
    same, _ = settled(kit, nano, requests, expected, mode, kind, rng.randrange(8), rng.randrange(6), **options)
    assert same
