"""The image encoder and images in the engine on an NVIDIA GPU."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """v41-mini's sizes with random weights and a tower of production heads, on both devices."""
    from orchestrator.model.load import load_model
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_mini

    config = v41_mini(vision=True)
    numbers = replace(config.vision, hidden_size=256, num_attention_heads=4, num_hidden_layers=4, intermediate_size=704)
    path = make_model(replace(config, vision=numbers), tmp_path_factory.mktemp("mini"), seed=3)
    return load_model(path), load_model(path, device="cuda")


def picture(model, width: int, height: int, seed: int = 0):
    from PIL import Image

    from orchestrator.model.vision import prepare

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return prepare(Image.fromarray(pixels), model.config.vision)


def requests_of(model):
    from orchestrator.engine.request import SamplingParams
    from orchestrator.vision import place

    rng, token = np.random.default_rng(1), model.config.image_token_id
    tokens = [*rng.integers(3, 3000, 40).tolist(), token, *rng.integers(3, 3000, 60).tolist(), token, 7]
    prompt, images = place(tokens, [picture(model, 300, 200), picture(model, 640, 480, 1)], token)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return {"image": (prompt, params, images), "text": (rng.integers(3, 3000, 150).tolist(), params, [])}


def run(engine, requests) -> dict[str, list[int]]:
    from orchestrator.engine.request import TokenOutput

    for name, (prompt, params, images) in requests.items():
        engine.add(name, list(prompt), params, images=images)
    found: dict[str, list[int]] = {name: [] for name in requests}
    for _ in range(4000):
        if not engine.has_work:
            break
        for event in engine.step():
            if isinstance(event, TokenOutput):
                found[event.request_id].append(event.token_id)
    assert not engine.has_work
    return found


@pytest.mark.parametrize("size", [(300, 200), (1920, 1080), (17, 900)])
def test_rows_are_those_of_a_cpu(models, size):
    """bfloat16 products here, float32 there: the error is that of the rounding, on average a fraction of a per cent."""
    from orchestrator.model.vision import VisionEncoder

    image = picture(models[0], *size)
    host, device = (VisionEncoder(model.weights).encode(image).float() for model in models)
    assert bool(device.isfinite().all())
    assert (device - host).norm() <= 0.03 * host.norm()
    assert torch.equal(device, VisionEncoder(models[1].weights).encode(image).float())


@pytest.mark.parametrize("chunk", [512, 33])
@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_depend_on_neither_chunks_nor_neighbours(models, chunk, graphs):
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine

    options = {"device": "cuda", "num_blocks": 64, "max_num_seqs": 4}
    requests = requests_of(models[1])
    plain = Engine(models[1], None, EngineConfig(**options, overlap=False, speculation="off", cuda_graphs=False))
    expected = {name: run(plain, {name: request})[name] for name, request in requests.items()}
    engine = Engine(models[1], None, EngineConfig(**options, chunk_tokens=chunk, cuda_graphs=graphs))
    assert run(engine, requests) == expected


def test_encoding_beside_steps(models):
    """Images are encoded by another thread, on a stream of its own, while steps run and graphs are recorded."""
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine

    requests = requests_of(models[1])
    engine = Engine(models[1], None, EngineConfig(device="cuda", num_blocks=64, max_num_seqs=4))
    expected = run(engine, {"text": requests["text"]})
    image, other = picture(models[1], 800, 600), Engine(models[1], None, EngineConfig(device="cuda", num_blocks=64))
    alone = engine.images.encoder.encode(image)
    wrong, stop = [], threading.Event()

    def encode():
        while not stop.is_set():
            if not torch.equal(other.images.encoder.encode(image), alone):
                wrong.append(1)

    thread = threading.Thread(target=encode)
    thread.start()
    try:
        for _ in range(3):
            assert run(other, {"text": requests["text"]}) == expected
    finally:
        stop.set()
        thread.join()
    assert not wrong and not any(graphs is not None and graphs.failed for graphs in (other.runner.graphs,))
