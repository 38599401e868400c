"""How requests end otherwise: cancelled, refused, failed, on a lost worker, with the service."""

import asyncio
import gc
import threading
import time
from dataclasses import replace

import pytest
from service_kit_front import until, wait_until

from orchestrator.engine.request import EngineFull, Finished, GrammarSpec, Ready, SamplingParams
from orchestrator.roles.messages import Accepted, Refused, Submit, Tokens
from orchestrator.service.front.engine import Draining
from orchestrator.service.messages import Book

PROMPT = list(range(3, 40))
LONG = list(range(3, 203))


async def collect(engine, name="r", prompt=PROMPT, **params):
    return [e async for e in engine.generate(name, prompt, SamplingParams(**{"max_tokens": 50, **params}))]


@pytest.mark.parametrize("held", ["Begin", "RunPrefill", "Export", "Load", "RunDecode", "none"])
@pytest.mark.parametrize("how", ["close", "task", "abort"])
def test_cancel_at_every_point(make_rig, held, how):
    """Whatever the workers are at, a cancelled request is held nowhere afterwards (the fixture waits for that)."""
    rig = make_rig(lambda spec: LONG)
    rig.cluster.held = {held}
    rig.cluster.delay = 0.005

    async def start_and_leave():
        source = rig.engine.generate("r", PROMPT, SamplingParams(max_tokens=300))
        reading = asyncio.ensure_future(anext(source))
        if held == "none":
            assert isinstance(await reading, Ready)
            await anext(source)
            reading = asyncio.ensure_future(anext(source))
        else:
            await until(lambda: rig.cluster.waits_for(held))
        if how == "abort":
            rig.engine.abort("r")
            events = [await reading, *[e async for e in source]]
            assert isinstance(events[-1], Finished) and events[-1].reason == "abort"
        else:
            if not reading.done():
                reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await source.aclose()
        assert rig.engine.idle and not rig.engine.progress.has_work

    asyncio.run(start_and_leave())
    rig.cluster.release()
    wait_until(rig.free, what=rig.cluster.holding)
    assert rig.engine.entry.outcomes["cancelled"] == 1


def test_cancel_while_a_grammar_is_compiled(make_rig, monkeypatch):
    rig = make_rig()
    going, began = threading.Event(), threading.Event()

    def compiling(spec):
        began.set()
        assert going.wait(60)

    monkeypatch.setattr(rig.engine, "grammars", type("", (), {"compile": staticmethod(compiling)})())

    async def leave(how):
        task = asyncio.ensure_future(collect(rig.engine, grammar=GrammarSpec("regex", "a")))
        await until(began.is_set)
        if how == "abort":
            rig.engine.abort("r")
            going.set()
            assert [e.reason for e in await task] == ["abort"]
        else:
            task.cancel()
            going.set()
            await asyncio.gather(task, return_exceptions=True)
        began.clear(), going.clear()
        assert rig.engine.idle and not rig.engine.progress.has_work

    for how in ("abort", "cancel"):
        asyncio.run(leave(how))
    assert rig.engine.entry.received == 0


def test_what_can_never_run_is_refused_here(make_rig):
    rig = make_rig()
    cases = [
        ("prompt", [], {}),
        ("prompt", [10**6], {}),
        ("at most 511", [3] * 512, {}),
        ("stop_token_ids", PROMPT, {"stop_token_ids": (10**6,)}),
        ("prompt_logprobs", PROMPT, {"prompt_logprobs": True}),
        ("grammar", PROMPT, {"grammar": GrammarSpec("regex", "(")}),
    ]
    for words, prompt, params in cases:
        with pytest.raises(ValueError, match=words):
            asyncio.run(collect(rig.engine, "r", prompt, **params))
    assert rig.engine.idle and rig.engine.entry.received == 0


def test_ids_in_use(make_rig):
    rig = make_rig()

    async def twice():
        source = rig.engine.generate("r", PROMPT, SamplingParams())
        await anext(source)
        with pytest.raises(ValueError, match="unique"):
            await collect(rig.engine)
        await source.aclose()
        assert (await collect(rig.engine))[-1].reason == "stop"

    asyncio.run(twice())


def test_too_many_waiting(make_rig):
    rig = make_rig(most_waiting=2)
    rig.cluster.held = {"Begin"}

    async def crowd():
        tasks = [asyncio.ensure_future(collect(rig.engine, str(n))) for n in range(2)]
        await until(lambda: rig.engine.progress.waiting == 2)
        with pytest.raises(EngineFull, match="2 requests"):
            await collect(rig.engine, "one more")
        rig.cluster.release()
        assert [(await t)[-1].reason for t in tasks] == ["stop", "stop"]
        await collect(rig.engine, "again")

    asyncio.run(crowd())


def answering(rig, answer):
    """The router's word on the first attempt at a request is another one."""

    def fate(source, to, message):
        if isinstance(message, Submit):
            rig.engine.loop.take(answer(message))
            return []
        return [0.0]

    rig.cluster.fate = fate


def test_refusals_of_the_router(make_rig):
    rig = make_rig()
    answering(rig, lambda m: Refused(m.request, m.epoch, 429, 7, "too much"))
    with pytest.raises(EngineFull, match="too much") as caught:
        asyncio.run(collect(rig.engine))
    assert caught.value.retry_after == 7
    answering(rig, lambda m: Refused(m.request, m.epoch, 400, 0, "never"))
    with pytest.raises(ValueError, match="never"):
        asyncio.run(collect(rig.engine))


def test_failures(make_rig):
    rig = make_rig(lambda spec: LONG)
    rig.cluster.refuses = "no such prompt"
    (only,) = asyncio.run(collect(rig.engine))
    assert (only.reason, only.error) == ("error", "no such prompt")
    rig.cluster.refuses = ""
    assert asyncio.run(collect(rig.engine))[-1].reason == "length"
    assert rig.engine.entry.outcomes["failed"] == 1


def test_a_router_that_does_not_answer(make_rig):
    rig = make_rig()
    rig.cluster.crash("router")
    rig.engine.entry.settings = replace(rig.engine.entry.settings, admit=0.5)
    with pytest.raises(RuntimeError, match="router does not answer"):
        asyncio.run(collect(rig.engine))
    rig.cluster.start("router")


@pytest.mark.parametrize("lost", ["decode", "prefill", "router"])
def test_a_lost_worker(make_rig, lost):
    """Requests go on elsewhere, or on the one that is started anew, and nothing is lost or told twice."""
    rig = make_rig(lambda spec: LONG[: 20 + spec.seed], prefill=2, decode=2)
    rig.cluster.delay, rig.cluster.notes = 0.02, True

    async def scenario():
        tasks = [
            asyncio.ensure_future(collect(rig.engine, str(n), seed=n, max_tokens=300, logprobs=0)) for n in range(12)
        ]
        await until(lambda: rig.engine.progress.running >= 3)
        name = lost if lost == "router" else f"{lost}-0"
        rig.cluster.crash(name)
        await asyncio.sleep(0.2)
        rig.cluster.start(name)
        return await asyncio.gather(*tasks)

    for n, events in enumerate(asyncio.run(scenario())):
        assert [e.token_id for e in events[1:-1]] == LONG[: 20 + n]
        assert [e.logprob for e in events[1:-1]] == [-0.25 * (i + 1) for i in range(20 + n)]
        assert isinstance(events[0], Ready) and events[-1].reason == "stop"


def test_close_with_open_streams(make_rig):
    rig = make_rig(lambda spec: LONG)
    rig.cluster.held = {"RunDecode"}

    async def scenario():
        tasks = [asyncio.ensure_future(collect(rig.engine, str(n), max_tokens=300)) for n in range(5)]
        await until(lambda: rig.cluster.waits_for("RunDecode"))
        began = time.monotonic()
        await asyncio.to_thread(rig.engine.close)
        assert time.monotonic() - began < 30
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RuntimeError) and "shut down" in str(result)
        with pytest.raises(RuntimeError, match="shut down"):
            await collect(rig.engine)

    asyncio.run(scenario())
    rig.engine.close()  # once more does no harm
    assert rig.engine.entry.outcomes["cancelled"] == 5 and rig.engine.idle


def test_stop_taking(make_rig):
    rig = make_rig()
    rig.cluster.held = {"Begin"}

    async def scenario():
        task = asyncio.ensure_future(collect(rig.engine))
        await until(lambda: rig.cluster.waits_for("Begin"))
        rig.engine.stop_taking()
        with pytest.raises(Draining, match="shutting down") as caught:
            await collect(rig.engine, "new")
        assert caught.value.status == 503 and caught.value.retry_after > 0 and not rig.engine.idle
        rig.cluster.release()
        assert (await task)[-1].reason == "stop" and rig.engine.idle

    asyncio.run(scenario())


def test_progress(make_rig):
    rig = make_rig()
    assert not rig.engine.progress.has_work and not rig.engine.progress.stalled(0.0)
    rig.cluster.held = {"Begin"}

    async def scenario():
        task = asyncio.ensure_future(collect(rig.engine))
        await until(lambda: rig.cluster.waits_for("Begin"))
        progress = rig.engine.progress
        assert (progress.has_work, progress.running, progress.waiting) == (True, 0, 1)
        await until(lambda: rig.engine.progress.stalled(0.05))
        assert not rig.engine.progress.stalled(60.0)
        rig.cluster.release()
        await task

    asyncio.run(scenario())
    progress = rig.engine.progress
    assert (progress.has_work, progress.running, progress.waiting) == (False, 0, 0) and progress.steps > 0
    rig.engine.failed = "no worker can be started"
    assert rig.engine.progress.stalled(60.0)
    with pytest.raises(RuntimeError, match="no worker"):
        asyncio.run(collect(rig.engine))
    rig.engine.failed = None
    assert asyncio.run(collect(rig.engine))[-1].reason == "stop"


def test_a_loop_that_dies_tells_everybody(make_rig, monkeypatch):
    rig = make_rig()
    rig.cluster.held = {"Begin"}

    async def scenario():
        task = asyncio.ensure_future(collect(rig.engine))
        await until(lambda: rig.cluster.waits_for("Begin"))
        monkeypatch.setattr(rig.engine.entry, "step", lambda event, now: 1 / 0)
        rig.engine.loop.take(Accepted("x", 1, 1))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await task
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await collect(rig.engine)

    asyncio.run(scenario())
    assert rig.engine.progress.stalled(60.0)
    rig.engine.entry.live.clear()


def test_messages_that_are_not_for_an_entry(make_rig):
    rig = make_rig()
    rig.engine.loop.take(Book(1, {}))
    rig.engine.loop.take(Tokens("unknown", 1, "decode-0", 1, 1, 0, 0, (5,)))
    assert asyncio.run(collect(rig.engine))[-1].reason == "stop"
    dropped = rig.engine.status()["dropped"]
    assert dropped["Book is for another party"] == 1 and dropped["of an ended request"] >= 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the generator that is left behind
def test_readers_whose_event_loop_is_closed(make_rig):
    rig = make_rig(lambda spec: LONG)
    rig.cluster.held = {"RunDecode"}
    loop = asyncio.new_event_loop()
    source = rig.engine.generate("r", PROMPT, SamplingParams(max_tokens=300))
    reading = loop.create_task(anext(source))
    end = time.monotonic() + 60
    while not rig.cluster.waits_for("RunDecode") and time.monotonic() < end:
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    rig.cluster.release()
    wait_until(rig.free, what=rig.cluster.holding)
    del reading, source
    gc.collect()  # here, where it is told that nobody read to the end
