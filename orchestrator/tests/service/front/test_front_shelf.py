"""Images: on the shelf while their request runs, given to encoders that ask."""

import asyncio

import numpy as np
import pytest
from PIL import Image as Picture
from service_kit_front import seeing, until, wait_until

from orchestrator.engine.request import EngineFull, SamplingParams
from orchestrator.model.vision.image import prepare
from orchestrator.service.front.shelf import Shelf
from orchestrator.service.pixels import pack
from orchestrator.vision import place


@pytest.fixture
def picture():
    def make(seed=0):
        pixels = np.random.default_rng(seed).integers(0, 256, (80, 100, 3), dtype=np.uint8)
        return prepare(Picture.fromarray(pixels), seeing().vision)

    return make


def prompt_of(rig, *images):
    tokens = [5, 6]
    for _ in images:
        tokens += [rig.model.image_token_id, 7]
    return place(tokens, list(images), rig.model.image_token_id)


def test_encoders_get_what_they_ask_for(make_rig, picture):
    rig = make_rig("seen", vision=True, encoder=1)
    one, two = picture(1), picture(2)
    prompt, placed = prompt_of(rig, one, two, one)
    rig.cluster.held = {"Begin"}

    async def scenario():
        task = asyncio.ensure_future(collect(rig.engine, prompt, placed))
        await until(lambda: rig.cluster.waits_for("Begin"), task)
        assert placed == [] and len(rig.engine.shelf) == 2
        rig.cluster.release()
        return await task

    events = asyncio.run(scenario())
    assert events[-1].reason == "stop" and len(rig.engine.shelf) == 0
    assert sorted(rig.cluster.pixels) == sorted((i.digest.hex(), pack(i)) for i in (one, two))


async def collect(engine, prompt, images, name="r"):
    return [e async for e in engine.generate(name, prompt, SamplingParams(max_tokens=50), images=images)]


def test_leaving_while_an_image_is_encoded(make_rig, picture):
    rig = make_rig("seen", vision=True, encoder=1)
    prompt, placed = prompt_of(rig, picture())
    lost = rig.cluster.fate
    rig.cluster.fate = lambda source, to, message: [] if type(message).__name__ == "WantPixels" else [0.0]

    async def scenario():
        task = asyncio.ensure_future(collect(rig.engine, prompt, placed))
        await until(lambda: bool(rig.cluster.ports["encoder-0"].wanted), task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert len(rig.engine.shelf) == 0 and rig.engine.shelf.size == 0
    rig.cluster.fate = lost
    wait_until(lambda: bool(rig.cluster.pixels))
    assert rig.cluster.pixels[0][1] == b"", "nobody waits for an image that is gone"


def test_images_that_cannot_be_served(make_rig, picture):
    rig = make_rig("seen", vision=True)
    prompt, placed = prompt_of(rig, picture())
    assert not rig.engine.takes_images
    with pytest.raises(ValueError, match="no encoder"):
        asyncio.run(collect(rig.engine, prompt, placed))
    text_only = make_rig("seen")
    with pytest.raises(ValueError, match="no image encoder"):
        asyncio.run(collect(text_only.engine, prompt, placed))
    misplaced = make_rig("seen", vision=True, encoder=1)
    with pytest.raises(ValueError, match=r"images\[0\]"):
        asyncio.run(collect(misplaced.engine, [5] * len(prompt), placed))
    assert len(misplaced.engine.shelf) == 0


def test_a_shelf_without_room(make_rig, picture):
    rig = make_rig("seen", vision=True, encoder=1)
    rig.engine.shelf.capacity = 1
    rig.cluster.held = {"Begin"}
    (first, one), (second, two) = prompt_of(rig, picture(1)), prompt_of(rig, picture(2))

    async def scenario():
        task = asyncio.ensure_future(collect(rig.engine, first, one))
        await until(lambda: rig.cluster.waits_for("Begin"), task)
        with pytest.raises(EngineFull, match="bytes"):
            await collect(rig.engine, second, two, "other")
        rig.cluster.release()
        await task
        return await collect(rig.engine, second, two, "other")

    assert asyncio.run(scenario())[-1].reason == "stop"


def test_shelf_counts_holders(picture):
    shelf, image, other = Shelf(1 << 30), picture(1), picture(2)
    digest = image.digest.hex()
    assert [i.digest for i in shelf.put("a", [image, other, image])] == [digest, other.digest.hex()]
    (named,) = shelf.put("b", [picture(1)])
    assert named.patches == image.geometry.patches and shelf.size == 2 * image.pixels.nbytes
    shelf.release("a")
    assert shelf.get(digest) is not None and shelf.get(other.digest.hex()) is None
    shelf.release("b")
    shelf.release("b")
    assert len(shelf) == 0 and shelf.size == 0
