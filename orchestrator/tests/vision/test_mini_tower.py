"""The image encoder of v41-mini: made by a command, small, and of no consequence for text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from orchestrator.commands.errors import UsageError
from orchestrator.commands.vision import add_vision as command
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import SamplingParams
from orchestrator.model.checkpoint import Checkpoint, CheckpointError, tensor_specs, verify_checkpoint
from orchestrator.model.checkpoint.vision_shard import SHARD, add_vision
from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_mini, v41_nano
from orchestrator.model.vision import prepare
from orchestrator.text import load_tokenizer
from orchestrator.vision import place

FOLDER = Path(__file__).parents[3] / "models" / "v41-mini"
SEED = 41
INDEX = "model.safetensors.index.json"

needs_mini = pytest.mark.skipif(not (FOLDER / SHARD).is_file(), reason="models/v41-mini is not there")


@pytest.fixture(scope="module")
def text_only(tmp_path_factory):
    """The published model as it was before it got an encoder."""
    folder = tmp_path_factory.mktemp("mini")
    for path in FOLDER.glob("model-*.safetensors"):
        (folder / path.name).symlink_to(path)
    shutil.copy(FOLDER / "tokenizer.json", folder)
    config = json.loads((FOLDER / "config.json").read_text())
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    index = json.loads((FOLDER / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != SHARD}
    specs = tensor_specs(Checkpoint(FOLDER).config)
    index["metadata"]["total_size"] = sum(specs[name].nbytes for name in index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return folder


@needs_mini
def test_the_command_makes_the_published_file(text_only, tmp_path, capsys):
    shutil.copytree(text_only, tmp_path / "mini", symlinks=True)
    assert command(tmp_path / "mini", SEED) == 0
    assert "334,720 parameters with random weights (seed 41), 0.7 MB" in capsys.readouterr().out
    for name in (SHARD, INDEX, "config.json"):
        assert (tmp_path / "mini" / name).read_bytes() == (FOLDER / name).read_bytes(), name
    assert (FOLDER / SHARD).stat().st_size < 3 * 10**6
    verify_checkpoint(FOLDER)
    assert Checkpoint(FOLDER).config.vision == v41_mini(vision=True).vision
    with pytest.raises(UsageError, match="has an image encoder already"):
        command(tmp_path / "mini", SEED)


@needs_mini
def test_text_is_as_before(text_only, kit):
    """Tokens and log-probabilities, bit for bit."""
    prompt = load_tokenizer(FOLDER).encode("def fibonacci(n):\n    if n < 2:\n        return n\n    return")
    params = [kit.greedy(12), SamplingParams(max_tokens=12, seed=7, logprobs=2)]
    found = []
    for folder in (text_only, FOLDER):
        engine = kit.engine_of(load_model(folder))
        found.append(kit.run(engine, {f"r{n}": (prompt, p) for n, p in enumerate(params)}))
    assert [each[:2] for each in found[0].values()] == [each[:2] for each in found[1].values()]


@needs_mini
def test_it_reads_an_image(kit):
    model = load_model(FOLDER)
    image = prepare(kit.noise(224, 224), model.config.vision)
    prompt, images = kit.prompt_of(model.config, [5, image, 5])
    engine = kit.engine_of(model)
    tokens, logprobs, _ = kit.run(engine, {"r": (prompt, kit.greedy(3), images)})["r"]
    assert len(tokens) == 3 and all(value == value for value in logprobs)
    assert engine.images.counters.patches == 1521 and len(prompt) == 194


def test_a_model_in_one_file(tmp_path):
    """It gets an index, and its own file stays as it is."""
    folder = make_model(v41_nano(), tmp_path / "nano", seed=3)
    before = (folder / "model.safetensors").read_bytes()
    add_vision(folder, v41_nano(vision=True).vision, seed=5)
    assert (folder / "model.safetensors").read_bytes() == before
    model = load_model(folder)
    whole = load_model(make_model(v41_nano(vision=True), tmp_path / "whole", seed=5))
    assert set(model.weights.vision) == set(whole.weights.vision)
    assert all(torch.equal(model.weights.vision[name], tensor) for name, tensor in whole.weights.vision.items())
    assert not list(folder.glob(".*.partial"))
    with pytest.raises(ValueError, match=r"folder: got .*, which has an image encoder, allowed is one without"):
        add_vision(folder, v41_nano(vision=True).vision)


def test_half_a_change_is_noticed(tmp_path):
    """A file whose names are in the index while config.json knows of no encoder, as after a crash between the two."""
    folder = make_model(v41_nano(), tmp_path / "nano", seed=3)
    config = (folder / "config.json").read_bytes()
    add_vision(folder, v41_nano(vision=True).vision)
    (folder / "config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=r"has no vision_config; add it or remove the image tensors"):
        load_model(folder)


def test_only_small_models_get_one(tmp_path, monkeypatch):
    folder = make_model(v41_nano(), tmp_path / "nano", seed=3)
    config = Checkpoint(folder).config
    monkeypatch.setattr(
        Checkpoint, "__init__", lambda self, path: setattr(self, "config", replace(config, vocab_size=700))
    )
    with pytest.raises(UsageError, match="got a vocabulary of 700, allowed is v41-mini or v41-nano"):
        command(folder, 0)


@needs_mini
def test_an_engine_whose_images_are_encoded_elsewhere_reads_no_encoder():
    whole, without = load_model(FOLDER), load_model(FOLDER, vision=False)
    assert without.weights.vision is None and whole.weights.bytes_read - without.weights.bytes_read > 600_000
    assert torch.equal(whole.weights.image_newline, without.weights.image_newline)
    engine = Engine(without, None, EngineConfig(num_blocks=8))
    image = prepare(Image.new("RGB", (64, 64)), without.config.vision)
    prompt, images = place([5, without.config.image_token_id], [image], without.config.image_token_id)
    with pytest.raises(ValueError, match="encoder is elsewhere"):
        engine.add("r", prompt, SamplingParams(max_tokens=1), images=images)
    assert not engine.has_work
