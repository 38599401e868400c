"""Pixels are asked for until they come, checked, and encoded as the engine would; nothing else waits meanwhile."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from port_kit import eventually

from orchestrator.engine.handoff.pictures import image_bytes
from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.model.checkpoint.vision_weights import load_vision
from orchestrator.model.vision import prepare
from orchestrator.model.vision.encoder import VisionEncoder
from orchestrator.roles.engine_port import Begin, Drop, Dropped, Encode, EncodeDone, Reform, Reformed
from orchestrator.roles.messages import Image
from orchestrator.service.pixels import pack, unpack
from orchestrator.service.ports.encoder import EncoderPort


@pytest.fixture(scope="module")
def images(seeing):
    def picture(seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (60 + 20 * seed, 100, 3), dtype=np.uint8)
        return prepare(Picture.fromarray(pixels), seeing.config.vision)

    return [picture(seed) for seed in (1, 2, 3)]


def encode(image, entry="entry"):
    return Encode(Image(image.digest.hex(), image.geometry.patches), entry)


class Rig:
    def __init__(self, model, **options):
        self.asked = []
        self.port = EncoderPort(model, lambda *each: self.asked.append(each), **options)
        self.came = []

    def wait(self, count):
        def enough():
            self.came += self.port.answers()
            return len(self.came) >= count

        eventually(enough)
        return self.came


@pytest.fixture
def rig(seeing):
    rig = Rig(VisionEncoder(seeing.weights), every=0.05, patience=30.0)
    yield rig
    rig.port.close()


def test_embeddings_are_those_of_the_engine(seeing, seeing_path, images):
    rig = Rig(seeing_path, every=30.0)
    try:
        for image in images:
            rig.port.do(encode(image))
        assert rig.asked == [("entry", image.digest.hex()) for image in images]
        for image in images:
            rig.port.pixels(image.digest.hex(), pack(image))
        whole = VisionEncoder(seeing.weights)
        expected = [EncodeDone(i.digest.hex(), image_bytes(whole.encode(i))) for i in images]
        assert rig.wait(3) == expected
        numbers = rig.port.numbers()
        assert numbers["images"] == 3 and numbers["patches"] == sum(i.geometry.patches for i in images)
    finally:
        rig.port.close()


def test_only_the_encoder_is_read(seeing, seeing_path, nano_path):
    weights = load_vision(seeing_path)
    assert 0 < weights.bytes_read < seeing.weights.bytes_read / 2
    assert all(torch.equal(tensor, seeing.weights.vision[name]) for name, tensor in weights.vision.items())
    assert weights.vision.keys() == seeing.weights.vision.keys()
    with pytest.raises(CheckpointError, match="vision_config"):
        load_vision(nano_path)


def test_pixels_are_asked_for_until_they_come(rig, images):
    image = images[0]
    rig.port.do(encode(image))
    rig.port.do(encode(image))
    eventually(lambda: rig.port.answers() == [] and len(rig.asked) >= 4)
    rig.port.pixels("00" * 32, pack(image))
    assert rig.port.answers() == []
    rig.port.pixels(image.digest.hex(), pack(image))
    rig.port.pixels(image.digest.hex(), pack(image))
    assert len(rig.wait(1)) == 1 and rig.came[0].payload
    time.sleep(0.2)
    assert rig.port.answers() == [] and rig.port.counts["images"] == 1


@pytest.mark.parametrize("wrong", ["changed", "short", "another", "garbage"])
def test_wrong_pixels_are_counted_and_asked_for_again(rig, images, wrong):
    image, data = images[0], pack(images[0])
    bad = {
        "changed": data[:-1] + bytes([data[-1] ^ 1]),
        "short": data[:-1],
        "another": pack(images[1]),
        "garbage": b"x",
    }
    rig.port.do(encode(image))
    rig.port.pixels(image.digest.hex(), bad[wrong])
    eventually(lambda: rig.port.answers() == [] and rig.port.counts["pixels refused"] == 1)
    rig.port.pixels(image.digest.hex(), data)
    assert rig.wait(1)[0].payload


def test_pixels_that_never_come_are_a_failure(seeing, images):
    rig = Rig(VisionEncoder(seeing.weights), every=0.05, patience=0.3)
    try:
        rig.port.do(encode(images[0]))
        (done,) = rig.wait(1)
        assert "did not come" in done.why and not done.payload
        rig.port.do(encode(images[0]))
        rig.port.pixels(images[0].digest.hex(), b"")
        assert "not there any more" in rig.wait(2)[1].why
        rig.port.do(encode(images[0], ""))
        assert "nobody to ask" in rig.wait(3)[2].why
        assert not rig.port._wanted and not rig.port._encoding
    finally:
        rig.port.close()


def test_an_image_that_is_encoded_holds_up_no_question(rig, images, monkeypatch):
    going, go = threading.Event(), threading.Event()
    right = rig.port.encoder.encode

    def slow(image):
        going.set()
        assert go.wait(60)
        return right(image)

    monkeypatch.setattr(rig.port.encoder, "encode", slow)
    rig.port.do(encode(images[0]))
    rig.port.pixels(images[0].digest.hex(), pack(images[0]))
    assert going.wait(60)
    rig.port.do(encode(images[1]))
    eventually(lambda: rig.port.answers() == [] and len(rig.asked) >= 4)
    go.set()
    rig.port.pixels(images[1].digest.hex(), pack(images[1]))
    assert [done.digest for done in rig.wait(2)] == [i.digest.hex() for i in images[:2]]


def test_a_failure_of_one_image_is_its_own(rig, images, monkeypatch):
    right = rig.port.encoder.encode

    def broken(image):
        if image is not None and image.digest == images[0].digest:
            raise RuntimeError("no memory")
        return right(image)

    monkeypatch.setattr(rig.port.encoder, "encode", broken)
    for image in images[:2]:
        rig.port.do(encode(image))
        rig.port.pixels(image.digest.hex(), pack(image))
    first, second = rig.wait(2)
    assert "no memory" in first.why and second.payload


def test_other_commands(rig, images):
    rig.port.do(encode(images[0]))
    rig.port.do(Drop("r", 1))
    assert rig.port.answers() == [Dropped("r", 1)]
    rig.port.do(Reform(1))
    assert rig.port.answers() == [Reformed(1, 1, 0.0, 0)] and not rig.port._wanted
    with pytest.raises(TypeError, match="no use for"):
        rig.port.do(Begin("r", 1, None))


def test_pixels_travel_whole_or_not_at_all(images):
    for image in images:
        there = unpack(pack(image))
        assert there.digest == image.digest and there.geometry == image.geometry
        assert np.array_equal(there.pixels, image.pixels)
    data = pack(images[0])
    for wrong in (b"", data[:50], data[:-1], data + b"x", b"FPX2" + data[4:], data[:4] + b"\xff" * 24 + data[28:],
                  data[:4] + bytes(24) + data[28:], data[:-1] + bytes([data[-1] ^ 1])):  # fmt: skip
        with pytest.raises(ValueError, match="pixels"):
            unpack(wrong)
