"""One engine behind the roles gives its users what it gives without them."""

import asyncio
from dataclasses import replace

import pytest

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import EngineFull, Finished, GrammarSpec, Ready, SamplingParams, TokenOutput
from orchestrator.roles.local import RoleEngine, through_roles


@pytest.fixture(scope="module")
def nano_path(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    return make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20)


@pytest.fixture(scope="module")
def nano(nano_path):
    from orchestrator.model.load import load_model

    return load_model(nano_path)


@pytest.fixture(scope="module")
def tokenizer(nano_path):
    from orchestrator.text.tokenizer import load_tokenizer

    return load_tokenizer(nano_path)


def engines(model, tokenizer=None, **options):
    config = EngineConfig(**{"num_blocks": 64, "max_num_seqs": 4} | options)
    return Engine(model, tokenizer, config), RoleEngine(Engine(model, tokenizer, config))


REQUESTS = {
    "plain": ([5, 6, 7], SamplingParams(max_tokens=9, seed=1, ignore_eos=True)),
    "greedy": (list(range(3, 200)), SamplingParams(temperature=0.0, max_tokens=12)),
    "logprobs": ([9, 8, 7, 6], SamplingParams(max_tokens=7, seed=3, logprobs=2, prompt_logprobs=True)),
    "stops": ([100, 101], SamplingParams(max_tokens=40, seed=4, stop_token_ids=(7, 9, 11, 13, 17, 19, 23))),
    "text": ([40, 41, 42], SamplingParams(max_tokens=20, seed=5, stop=("e", "a"))),
    "grammar": ([40, 41], SamplingParams(max_tokens=20, seed=6, grammar=GrammarSpec("regex", "[a-c]{3}"))),
    "one": ([1], SamplingParams(max_tokens=1, seed=7)),
}


def everything(engine):
    events = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1}, {"prefix_cache": "bounded"}, {"overlap": True}])
def test_events_are_those_of_the_engine_alone(nano, tokenizer, options):
    alone, behind = engines(nano, tokenizer, **options)
    for engine in (alone, behind):
        for round_ in range(2):
            for name, (prompt, params) in REQUESTS.items():
                engine.add(f"{name} {round_}", prompt, params)
    expected, found = everything(alone), everything(behind)
    assert found == expected and len(found) == 2 * len(REQUESTS)
    assert all(isinstance(events[0], Ready) and isinstance(events[-1], Finished) for events in found.values())
    assert not behind._shared.references and not behind._shared._handed and not behind._names
    assert behind.scheduler.blocks.used == alone.scheduler.blocks.used


def test_requests_beyond_the_engine_wait_in_order_and_are_refused_beyond_that(nano):
    _, engine = engines(nano, max_num_seqs=1, max_waiting=3)
    for number in range(3):
        engine.add(f"r{number}", [1, 2], SamplingParams(max_tokens=3, seed=number, ignore_eos=True))
    with pytest.raises(EngineFull):
        engine.add("r3", [1, 2], SamplingParams())
    engine.step()
    engine.add("r3", [1, 2], SamplingParams(max_tokens=3, seed=9, ignore_eos=True))
    with pytest.raises(ValueError, match="request_id"):
        engine.add("r2", [1, 2], SamplingParams())
    found = everything(engine)
    ends = [name for name, events in found.items() if isinstance(events[-1], Finished)]
    assert ends == ["r0", "r1", "r2", "r3"]


def test_tenants_that_wait_share_the_engine(nano):
    _, engine = engines(nano, max_num_seqs=1)
    for number in range(8):
        params = SamplingParams(max_tokens=2, seed=number, ignore_eos=True, cache_salt="many")
        engine.add(f"many {number}", [1, 2], params)
    engine.add("few", [1, 2], SamplingParams(max_tokens=2, seed=9, ignore_eos=True, cache_salt="few"))
    ends = [name for name, events in everything(engine).items() if isinstance(events[-1], Finished)]
    assert ends.index("few") == 2, "behind the two that the engine had"


@pytest.mark.parametrize("steps", range(6))
def test_aborts_at_every_moment_end_at_once_and_free_everything(nano, tokenizer, steps):
    alone, behind = engines(nano, tokenizer, max_num_seqs=2)
    for engine in (alone, behind):
        for number in range(6):
            prompt = list(range(1, 150 + number))
            engine.add(f"r{number}", prompt, SamplingParams(max_tokens=8, seed=number, ignore_eos=True))
        for _ in range(steps):
            engine.step()
        engine.take_events()
        for name in ("r1", "r3", "r5", "nobody"):
            engine.abort(name)
    ended = [e for e in behind.take_events() if isinstance(e, Finished)]
    assert [(e.request_id, e.reason) for e in ended] == [("r1", "abort"), ("r3", "abort"), ("r5", "abort")]
    assert [replace(e, cached_tokens=0) for e in alone.take_events() if isinstance(e, Finished)] == ended
    assert everything(behind) == everything(alone)
    behind.add("r1", [1], SamplingParams(max_tokens=1))  # its name is free
    assert isinstance(everything(behind)["r1"][-1], Finished)
    assert behind.scheduler.slots.used == 0 and not behind.has_work


def test_bad_requests_leave_nothing(nano, tokenizer):
    _, engine = engines(nano, tokenizer)
    for prompt, params in (
        ([], SamplingParams()),
        ([512], SamplingParams()),
        ([1], SamplingParams(grammar=GrammarSpec("regex", "("))),
    ):
        with pytest.raises(ValueError, match=r"allowed|grammar"):
            engine.add("r", prompt, params)
        assert not engine.has_work and not engine._names and not engine._shared.references


def test_a_failing_row_ends_its_request_with_the_engines_words(nano, monkeypatch):
    alone, behind = engines(nano)
    for engine in (alone, behind):
        engine.add("r", [1, 2, 3], SamplingParams(max_tokens=5, seed=1))
        sequence = next(iter(engine._sequences.values()))
        original = engine._commit

        def spoiled(sequence, sample, original=original):
            return original(sequence, sample._replace(error="no distribution"))

        monkeypatch.setattr(engine if engine is alone else engine.engine, "_commit", spoiled)
        assert sequence.request_id == "r"
    expected, found = everything(alone)["r"][-1], everything(behind)["r"][-1]
    assert found == expected and found.reason == "error" and found.error == "no distribution"


def test_time_that_passes_without_work_ends_no_lease(nano, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("orchestrator.roles.local.time.monotonic", lambda: clock[0])
    _, engine = engines(nano)
    for number in range(4):
        clock[0] += 1000.0
        engine.add(f"r{number}", [1, 2], SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
        while engine.has_work:
            clock[0] += 100.0  # steps that take very long
            events = engine.step()
        assert isinstance(events[-1], Finished) and events[-1].reason == "length"


def test_behind_an_event_loop(nano, tokenizer):
    async def run():
        running = through_roles(Engine(nano, tokenizer, EngineConfig(num_blocks=64, max_num_seqs=2)))
        try:

            async def one(name, prompt, params):
                return [event async for event in running.generate(name, prompt, params)]

            names = list(REQUESTS)
            results = await asyncio.gather(*(one(name, *REQUESTS[name]) for name in names))
            stream = running.generate("left", [1, 2], SamplingParams(max_tokens=4000, ignore_eos=True))
            async for event in stream:
                if isinstance(event, TokenOutput):
                    break
            await stream.aclose()
            for _ in range(200):
                if not running.progress.has_work:
                    break
                await asyncio.sleep(0.02)
            return dict(zip(names, results, strict=True)), running.progress
        finally:
            running.close()

    found, progress = asyncio.run(run())
    alone, _ = engines(nano, tokenizer, max_num_seqs=2)
    for name, (prompt, params) in REQUESTS.items():
        alone.add(name, prompt, params)
    expected = everything(alone)

    def tokens(events):
        return [event.token_id for event in events if isinstance(event, TokenOutput)]

    assert {name: tokens(events) for name, events in found.items()} == {n: tokens(e) for n, e in expected.items()}
    assert progress.running == progress.waiting == 0 and progress.failed is None
