"""Images through the engine's thread: order, refusal, and nothing left behind by those who leave."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from orchestrator.engine.async_engine import AsyncEngine
from orchestrator.engine.request import EngineFull, Finished, TokenOutput
from orchestrator.roles.local import through_roles


class Gate:
    """An encoder that waits to be told."""

    def __init__(self, engine) -> None:
        self.images, self.began, self.go = engine.images, threading.Semaphore(0), threading.Event()
        self._encode = engine.images.encoder.encode
        engine.images.encoder.encode = self._gated

    def _gated(self, image):
        self.began.release()
        assert self.go.wait(20)
        return self._encode(image)


@pytest.fixture(params=["engine", "roles"])
def serving(request, nano, kit):
    """An engine behind its thread, by itself and as `fathom serve` runs it."""
    made = []

    def start(**options):
        engine = kit.engine_of(nano, **options)
        made.append(AsyncEngine(engine) if request.param == "engine" else through_roles(engine))
        return made[-1]

    yield start
    for each in made:
        each.close()


async def collect(engine, name, prompt, params, images=()):
    tokens, end = [], None
    async for event in engine.generate(name, prompt, params, images):
        if isinstance(event, TokenOutput):
            tokens.append(event.token_id)
        elif isinstance(event, Finished):
            end = event
    return tokens, end


def settled(engine) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        counters = engine.image_counters
        if counters.held_bytes == counters.patches_in_work == 0 and not engine.progress.has_work:
            return True
        time.sleep(0.01)
    return False


def test_answers_are_those_of_the_engine_alone(serving, nano, kit, picture):
    requests = {}
    for n in range(5):
        prompt, images = kit.prompt_of(nano.config, [10 + n, picture(seed=n % 3), 5], seed=n)
        requests[f"r{n}"] = (prompt, kit.greedy(6), images)
    expected = {name: each[0] for name, each in kit.run(kit.engine_of(nano), requests).items()}
    engine = serving()

    async def all_at_once():
        return await asyncio.gather(*(collect(engine, name, *request) for name, request in requests.items()))

    found = asyncio.run(all_at_once())
    assert {name: tokens for name, (tokens, _) in zip(requests, found, strict=True)} == expected
    assert settled(engine) and engine.image_counters.hits == 2
    assert all(not request[2] for request in requests.values()), "pixels are still there"


def test_text_does_not_wait_for_images(serving, nano, kit, picture):
    engine = serving()
    gate = Gate(engine.engine)
    prompt, images = kit.prompt_of(nano.config, [10, picture(), 5])
    text, _ = kit.prompt_of(nano.config, [12])

    async def both():
        seeing = asyncio.create_task(collect(engine, "image", prompt, kit.greedy(3), images))
        await asyncio.to_thread(gate.began.acquire)
        tokens, end = await asyncio.wait_for(collect(engine, "text", text, kit.greedy(3)), 10)
        assert len(tokens) == 3 and end.reason == "length" and not seeing.done()
        gate.go.set()
        return await seeing

    assert len(asyncio.run(both())[0]) == 3 and settled(engine)


def test_who_leaves_while_an_image_is_encoded(serving, nano, kit, picture):
    """Also while it waits its turn: then it is not encoded at all."""
    engine = serving()
    gate = Gate(engine.engine)
    prompt, images = kit.prompt_of(nano.config, [10, picture(seed=1), 5])
    other, more = kit.prompt_of(nano.config, [10, picture(seed=2), picture(seed=3), 5])

    async def leave():
        tasks = [
            asyncio.create_task(collect(engine, "a", prompt, kit.greedy(3), images)),
            asyncio.create_task(collect(engine, "b", other, kit.greedy(3), more)),
        ]
        await asyncio.to_thread(gate.began.acquire)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gate.go.set()

    asyncio.run(leave())
    assert settled(engine) and engine.progress.waiting == 0
    assert engine.image_counters.images <= 2
    assert asyncio.run(collect(engine, "c", *kit.prompt_of(nano.config, [4])[:1], kit.greedy(2)))[1].reason == "length"


def test_an_abort_that_comes_before_the_embeddings(serving, nano, kit, picture):
    engine = serving()
    gate = Gate(engine.engine)
    prompt, images = kit.prompt_of(nano.config, [10, picture(seed=1), 5])

    async def abort():
        task = asyncio.create_task(collect(engine, "a", prompt, kit.greedy(3), images))
        await asyncio.to_thread(gate.began.acquire)
        engine.abort("a")
        gate.go.set()
        return await task

    assert asyncio.run(abort())[1].reason == "abort" and settled(engine)


def test_too_many_patches_are_refused_at_once(serving, nano, kit, picture):
    first, second = picture(seed=1), picture(seed=2)
    engine = serving(image_patches=first.geometry.patches + second.geometry.patches - 1)
    gate = Gate(engine.engine)

    async def crowd():
        prompt, images = kit.prompt_of(nano.config, [10, first, 5])
        task = asyncio.create_task(collect(engine, "a", prompt, kit.greedy(2), images))
        await asyncio.to_thread(gate.began.acquire)
        prompt, images = kit.prompt_of(nano.config, [10, second, 5])
        with pytest.raises(EngineFull, match=r"\d+ patches of images are in work, and \d+ more are too many"):
            await asyncio.wait_for(collect(engine, "b", prompt, kit.greedy(2), images), 5)
        gate.go.set()
        await task
        return await collect(engine, "c", prompt, kit.greedy(2), images)

    assert len(asyncio.run(crowd())[0]) == 2 and settled(engine) and engine.progress.waiting == 0


def test_memory_for_embeddings(serving, nano, kit, picture):
    """A request that never fits is told so; one that does not fit now is refused, and welcome later."""
    size = picture().geometry.tokens * nano.config.hidden_size * 2
    small = serving(image_bytes=size - 1)
    prompt, images = kit.prompt_of(nano.config, [10, picture(), 5])
    with pytest.raises(ValueError, match=rf"take {size} bytes, allowed are {size - 1} \(image_bytes\)"):
        asyncio.run(collect(small, "a", prompt, kit.greedy(2), list(images)))
    assert settled(small)
    engine = serving(image_bytes=size)

    async def two():
        source = engine.generate("a", prompt, kit.greedy(40), list(images))
        await anext(source)
        other, more = kit.prompt_of(nano.config, [10, picture(seed=9), 5])
        with pytest.raises(EngineFull, match="images of other requests take"):
            await collect(engine, "b", other, kit.greedy(2), list(more))
        await source.aclose()
        await asyncio.to_thread(settled, engine)
        return await collect(engine, "b", other, kit.greedy(2), list(more))

    assert len(asyncio.run(two())[0]) == 2 and settled(engine)


def test_an_encoder_that_fails_fails_its_request_alone(serving, nano, kit, picture):
    engine = serving()
    prompt, images = kit.prompt_of(nano.config, [10, picture(seed=1), 5])

    def broken(image):
        raise RuntimeError("out of memory")

    works, engine.engine.images.encoder.encode = engine.engine.images.encoder.encode, broken
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(collect(engine, "a", prompt, kit.greedy(2), list(images)))
    engine.engine.images.encoder.encode = works
    assert settled(engine) and engine.image_counters.bytes == 0 and engine.progress.failed is None
    assert len(asyncio.run(collect(engine, "a", prompt, kit.greedy(2), list(images)))[0]) == 2
