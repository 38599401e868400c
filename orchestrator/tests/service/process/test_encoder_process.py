"""An encoder's process: asks the front for pixels, gives the embedding to whoever fetches it."""

import signal
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image as Picture
from service_kit_process import Supervisor, Worker, until

from orchestrator.engine.handoff.pictures import image_bytes
from orchestrator.model.vision import prepare
from orchestrator.model.vision.encoder import VisionEncoder
from orchestrator.roles.messages import (
    AssignImage,
    EmbeddingPiece,
    Image,
    ImageReady,
    Release,
    Report,
    WantEmbedding,
    WorkFailed,
)
from orchestrator.roles.state_parts import checksum_of
from orchestrator.service.config import Model, Roles, ServiceConfig
from orchestrator.service.messages import Book, Pixels, WantPixels
from orchestrator.service.pixels import pack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    config = v41_nano(vision=True)
    config = replace(config, vision=replace(config.vision, min_pixels=14 * 14 * 12, max_image_tokens=40))
    return make_model(config, tmp_path_factory.mktemp("seeing"), seed=21)


@pytest.fixture(scope="module")
def weights(folder):
    from orchestrator.model.checkpoint.vision_weights import load_vision

    return load_vision(folder)


@pytest.fixture(scope="module")
def encoder(weights):
    return VisionEncoder(weights)


@pytest.fixture
def picture(weights):
    pixels = np.random.default_rng(5).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    return prepare(Picture.fromarray(pixels), weights.config.vision)


@pytest.fixture
def running(folder, tmp_path):
    """Everybody but the encoder, and the encoder's process."""
    others = Supervisor("router", "entry", "prefill-0")
    config = ServiceConfig(model=Model(str(folder)), roles=Roles(encoder=1), times={"beat": 0.2})
    worker = Worker(others.spec("encoder-0", config, tmp_path))

    def up():
        assert worker.process.poll() is None, worker.said
        return others.heard.hello("encoder-0")

    try:
        hello = until(up)
        others.know({"encoder-0": hello.address})
        names = ("router", "entry", "prefill-0")
        others.post.send("encoder-0", Book(1, dict.fromkeys(names, others.post.address)))
        until(lambda: others.heard.of(Report))
        yield others, worker
    finally:
        worker.end()
        others.post.close()


def test_an_image(running, picture, encoder):
    others, worker = running
    heard, digest = others.heard, picture.digest.hex()
    incarnation = heard.of(Report)[-1].incarnation
    others.post.send("encoder-0", AssignImage("r", 1, incarnation, "entry", Image(digest, picture.geometry.patches)))
    until(lambda: heard.of(WantPixels))
    assert heard.of(WantPixels)[0] == WantPixels(digest, "encoder-0")
    count = len(heard.of(WantPixels))
    until(lambda: len(heard.of(WantPixels)) > count)  # until they come
    others.post.send("encoder-0", Pixels(digest, pack(picture)))
    ready = until(lambda: heard.of(ImageReady))[0]
    assert (ready.digest, ready.worker) == (digest, "encoder-0")
    others.post.send("encoder-0", WantEmbedding("r", 1, digest, "prefill-0", incarnation))
    piece = until(lambda: heard.of(EmbeddingPiece))[0]
    assert piece.checksum == checksum_of(piece.payload)
    assert piece.payload == bytes(image_bytes(encoder.encode(picture)))
    others.post.send("encoder-0", Release("r", 1, True))
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_an_image_that_the_front_has_no_more(running, picture):
    others, worker = running
    heard, digest = others.heard, picture.digest.hex()
    incarnation = heard.of(Report)[-1].incarnation
    others.post.send("encoder-0", AssignImage("r", 1, incarnation, "entry", Image(digest, picture.geometry.patches)))
    until(lambda: heard.of(WantPixels))
    others.post.send("encoder-0", Pixels(digest, b""))
    until(lambda: heard.of(WorkFailed))
    assert worker.process.poll() is None
