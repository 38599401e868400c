"""The engine behind an event loop: many readers, some of whom leave, and an engine that may die."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from contextlib import contextmanager

import pytest

from orchestrator.engine.async_engine import AsyncEngine
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import EngineFull, Finished, GrammarSpec, Ready, SamplingParams, TokenOutput
from orchestrator.text.tokenizer import load_tokenizer

LONG = SamplingParams(max_tokens=3000, seed=1, ignore_eos=True)
DIGITS = SamplingParams(max_tokens=9, seed=1, grammar=GrammarSpec("regex", "[0-9]{3}"))


def short(seed: int, count: int = 6) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(nano_path):
    return load_tokenizer(nano_path)


@contextmanager
def running(model, tokenizer=None, **options):
    engine = AsyncEngine(Engine(model, tokenizer, EngineConfig(**{"num_blocks": 128, "max_num_seqs": 4} | options)))
    try:
        yield engine
    finally:
        engine.close()
        assert not engine._thread.is_alive()


async def collect(engine: AsyncEngine, name: str, params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3)) -> list:
    return [event async for event in engine.generate(name, list(prompt), params)]


async def until(condition, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def is_idle(engine: AsyncEngine) -> bool:
    core = engine.engine
    return (
        not (engine._streams or engine._open or engine._commands or engine._arriving or core._sequences)
        and not core.has_work
        and core.scheduler.slots.used == core.scheduler.blocks.used == 0
    )


def test_many_at_once_get_what_they_get_alone(nano):
    with running(nano) as engine:

        async def main():
            prompts = {str(i): tuple(range(3, 4 + i % 9)) for i in range(30)}
            results = await asyncio.gather(*(collect(engine, n, short(int(n)), p) for n, p in prompts.items()))
            for (name, prompt), events in zip(prompts.items(), results, strict=True):
                assert [type(e) for e in events] == [Ready] + [TokenOutput] * 6 + [Finished]
                assert {e.request_id for e in events} == {name}
                assert events[0].prompt_tokens == len(prompt)
            for name in ("0", "13", "29"):
                again = await collect(engine, name, short(int(name)), prompts[name])
                assert again == results[int(name)]
            await until(lambda: is_idle(engine))

        asyncio.run(main())


def test_leaving_frees_the_slot_within_two_steps(nano, monkeypatch):
    with running(nano) as engine:
        freed_at = []
        abort = engine.engine.abort

        def note(request_id):  # on the engine's thread: a poll from here could come any number of steps later
            abort(request_id)
            freed_at.append(engine.engine.stats.steps)

        monkeypatch.setattr(engine.engine, "abort", note)

        async def main():
            other = asyncio.create_task(collect(engine, "other", short(1, 150)))
            for stop_after in (Ready, TokenOutput):
                events = engine.generate("r", [1, 2], LONG)
                async for event in events:
                    if isinstance(event, stop_after):
                        break
                await events.aclose()
                left_at = engine.engine.stats.steps
                await until(lambda: "r" not in engine.engine._sequences)
                assert freed_at.pop() <= left_at + 2 and not freed_at
            assert len(await other) == 152
            await until(lambda: is_idle(engine))

        asyncio.run(main())


def test_cancelling_the_reading_task_aborts(nano):
    with running(nano, max_num_seqs=2) as engine:

        async def main():
            tasks = [asyncio.create_task(collect(engine, str(i), LONG)) for i in range(4)]  # two of them wait
            await until(lambda: engine.engine.stats.output_tokens > 4)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(task.cancelled() for task in tasks)
            await until(lambda: is_idle(engine), 2)

        asyncio.run(main())


def test_cancelling_at_once_leaves_nothing(nano, tokenizer):
    with running(nano, tokenizer) as engine:

        async def main():
            for delay in range(12):
                params = DIGITS if delay % 2 else LONG
                task = asyncio.create_task(collect(engine, "same id", params))
                for _ in range(delay // 2):
                    await asyncio.sleep(0.001 * (delay > 6))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert len(await collect(engine, "same id", short(1))) == 8
            await until(lambda: is_idle(engine))

        asyncio.run(main())


def test_an_id_used_again_never_sees_events_of_its_predecessor(nano):
    with running(nano) as engine:

        async def main():
            expected = [(type(e), getattr(e, "token_id", None)) for e in await collect(engine, "r", short(7))]
            for _ in range(10):
                events = engine.generate("r", [5] * 9, LONG)
                async for event in events:
                    if isinstance(event, TokenOutput):
                        break
                await events.aclose()
                got = await collect(engine, "r", short(7))
                assert [(type(e), getattr(e, "token_id", None)) for e in got] == expected

        asyncio.run(main())


def test_abort_by_id(nano):
    with running(nano) as engine:

        async def main():
            engine.abort("unknown")
            task = asyncio.create_task(collect(engine, "r", LONG))
            await until(lambda: engine.engine.stats.output_tokens > 2)
            engine.abort("r")
            engine.abort("r")
            assert (await task)[-1].reason == "abort"
            engine.abort("r")
            await until(lambda: is_idle(engine))

        asyncio.run(main())


def test_grammars_compile_beside_the_engine(nano, tokenizer, monkeypatch):
    """Others go on meanwhile, and an abort by id or by leaving finds the request there, too."""
    with running(nano, tokenizer) as engine:
        gate, compile_now = threading.Event(), engine.engine.compile

        def compile_late(params):
            if params.grammar is not None:
                gate.wait(10)
            return compile_now(params)

        monkeypatch.setattr(engine.engine, "compile", compile_late)

        async def main():
            tasks = [asyncio.create_task(collect(engine, str(i), DIGITS)) for i in range(3)]
            await until(lambda: engine.progress.waiting == 3)
            assert len(await collect(engine, "plain", short(1))) == 8
            assert not engine.progress.has_work
            engine.abort("1")
            tasks[2].cancel()
            gate.set()
            first, second, third = await asyncio.gather(*tasks, return_exceptions=True)
            assert first[-1].reason == "stop" and len("".join(e.text for e in first[1:])) == 3
            assert [(type(e), e.reason) for e in second] == [(Finished, "abort")]
            assert isinstance(third, asyncio.CancelledError)
            await until(lambda: is_idle(engine))

        asyncio.run(main())


def test_refusals_come_before_anything_runs(nano, tokenizer):
    with running(nano, tokenizer) as engine:

        async def main():
            bad = SamplingParams(grammar=GrammarSpec("regex", "("))
            for prompt, params, name in (([], LONG, "prompt"), ([9999], LONG, "prompt"), ([1], bad, "grammar")):
                with pytest.raises(ValueError, match=f"^{name}"):
                    await anext(engine.generate("r", prompt, params))
            task = asyncio.create_task(collect(engine, "r", LONG))
            await until(lambda: engine.progress.running == 1)
            with pytest.raises(ValueError, match=r"^request_id"):
                await anext(engine.generate("r", [1], LONG))
            assert engine.progress.running == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: is_idle(engine))

        asyncio.run(main())


def test_a_full_queue_refuses(nano):
    with running(nano, max_num_seqs=1, max_waiting=3) as engine:

        async def main():
            holder = asyncio.create_task(collect(engine, "holder", LONG))
            await until(lambda: engine.progress.running == 1)
            results = await asyncio.gather(
                *(asyncio.wait_for(collect(engine, str(i), short(i)), 0.5) for i in range(8)), return_exceptions=True
            )
            kinds = [type(r) for r in results]
            assert kinds.count(EngineFull) == 5 and kinds.count(TimeoutError) == 3
            holder.cancel()
            await asyncio.gather(holder, return_exceptions=True)
            await until(lambda: is_idle(engine))

        asyncio.run(main())


def test_a_dying_engine_tells_everybody(nano, monkeypatch):
    with running(nano, max_num_seqs=2) as engine:

        async def main():
            assert not engine.progress.stalled(0.0) and engine.progress.failed is None
            tasks = [asyncio.create_task(collect(engine, str(i), LONG)) for i in range(4)]
            await until(lambda: engine.engine.stats.output_tokens > 4)
            monkeypatch.setattr(engine.engine.runner, "run", lambda step: 1 / 0)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
            assert all(isinstance(r, RuntimeError) and "ZeroDivisionError" in str(r) for r in results)
            assert engine.progress.stalled(1e9) and "ZeroDivisionError" in engine.progress.failed
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                await anext(engine.generate("late", [1], LONG))

        asyncio.run(main())


def test_a_hanging_step_is_a_stall_and_an_idle_engine_is_none(nano, monkeypatch):
    with running(nano) as engine:
        gate, run_now = threading.Event(), engine.engine.runner.run

        def hang(step):
            gate.wait(10)
            return run_now(step)

        async def main():
            await collect(engine, "r", short(1))
            await asyncio.sleep(0.25)
            assert not engine.progress.stalled(0.2)
            monkeypatch.setattr(engine.engine.runner, "run", hang)
            task = asyncio.create_task(collect(engine, "r", short(1)))
            await asyncio.sleep(0.05)
            assert not engine.progress.stalled(0.2)  # counted from when work came
            await until(lambda: engine.progress.stalled(0.2))
            gate.set()
            await task
            assert not engine.progress.stalled(0.2)

        asyncio.run(main())


def test_close_ends_open_requests_and_may_come_twice(nano):
    with running(nano) as engine:

        async def main():
            task = asyncio.create_task(collect(engine, "r", LONG))
            await until(lambda: engine.engine.stats.output_tokens > 2)
            await asyncio.to_thread(engine.close)
            with pytest.raises(RuntimeError, match="the engine stopped: shut down"):
                await task
            with pytest.raises(RuntimeError, match="shut down"):
                await anext(engine.generate("late", [1], LONG))
            engine.abort("r")
            engine.close()

        asyncio.run(main())
        assert not engine._commands and not engine._open


def test_a_loop_that_goes_away_does_not_stop_the_engine(nano):
    with running(nano) as engine:
        loop = asyncio.new_event_loop()
        events = engine.generate("r", [1], short(1, 150))
        loop.run_until_complete(anext(events))
        loop.close()
        deadline = time.monotonic() + 20
        while engine.progress.has_work and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.progress.failed is None and not engine._streams
        assert len(asyncio.run(collect(engine, "other", short(1)))) == 8


def test_progress_may_be_read_from_anywhere(nano):
    with running(nano, max_num_seqs=2) as engine:
        errors, stop = [], threading.Event()

        def read():
            try:
                while not stop.is_set():
                    progress = engine.progress
                    assert progress.running <= 2 and 0 <= progress.waiting <= 40 and progress.failed is None
                    time.sleep(0)  # others may have the interpreter's lock
            except Exception as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()

        async def main():
            tasks = [asyncio.create_task(collect(engine, str(i), short(i, 3))) for i in range(40)]
            await asyncio.sleep(0.02)
            for task in tasks[::3]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: is_idle(engine))

        asyncio.run(main())
        stop.set()
        reader.join()
        assert errors == []


def test_a_left_stream_is_not_kept(nano):
    with running(nano) as engine:

        async def main():
            events = engine.generate("r", [1], LONG)
            await anext(events)
            stream = weakref.ref(engine._open["r"])
            await events.aclose()
            del events
            await until(lambda: is_idle(engine))
            await asyncio.sleep(0.01)
            gc.collect()
            assert stream() is None

        asyncio.run(main())
