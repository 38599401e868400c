"""Trained tensors become a checkpoint that verifies and runs, and come back as what their formats keep of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from orchestrator.model.checkpoint import Checkpoint, layout, verify_checkpoint
from orchestrator.model.checkpoint.specs import stored_weights
from orchestrator.model.init import initial_values
from orchestrator.model.presets import v41_nano
from orchestrator.train.export import export_checkpoint, import_checkpoint, without_drafter

CONFIG = v41_nano(stages=1)


@pytest.fixture(scope="module")
def tensors():
    """Random values as a trainer holds them; stacked here without the code under test."""
    values, experts = {}, {}
    for stored in stored_weights(CONFIG):
        value = initial_values(CONFIG, stored, seed=2)
        before, found, after = stored.name.partition(".ffn.experts.")
        if found:
            number, part = after.split(".")
            experts.setdefault(f"{before}.ffn.experts.{part}", {})[int(number)] = value
        else:
            values[stored.name] = value
    return values | {name: torch.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


@pytest.fixture(scope="module")
def exported(tensors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    cap, layout.CAPPED_BYTES = layout.CAPPED_BYTES, 1 << 20
    try:
        config = export_checkpoint(tensors, CONFIG, folder)
    finally:
        layout.CAPPED_BYTES = cap
    return folder, config


def test_it_is_a_whole_model(exported):
    folder, config = exported
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"} <= names
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) > 1 and all(shard.stat().st_size <= 1 << 20 for shard in shards)
    assert verify_checkpoint(folder) > 1_000_000
    assert Checkpoint(folder).config == config
    from orchestrator.engine.llm import LLM
    from orchestrator.engine.request import SamplingParams
    from orchestrator.model.load import load_model

    assert config.engram_compressed_vocab_size < 512
    load_model(folder)  # checks the map of the tokenizer against the config
    assert LLM(folder).generate(["def f("], SamplingParams(max_tokens=3, temperature=0))


def test_back_again(exported, tensors):
    """What storage loses is lost once: the values that come back are stored without loss."""
    folder, config = exported
    back = import_checkpoint(folder)
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == torch.float32 and back[name].shape == value.shape, name
        assert (back[name] - value).norm() / value.norm() < 0.2, name
    expert = "layers.3.ffn.experts.w1"  # each expert in its own place
    errors = torch.stack([(back[expert][e] - tensors[expert]).flatten(1).norm(dim=1) for e in range(8)])
    assert torch.equal(errors.argmin(1), torch.arange(8))
    for name in ("layers.0.attn.attn_sink", "layers.3.ffn.gate.bias"):
        assert torch.equal(back[name], tensors[name])

    again = folder.parent / "again"
    export_checkpoint(back, CONFIG, again, placement="single")
    assert Checkpoint(again).config == config
    for name, value in import_checkpoint(again).items():  # a group whose largest value was rounded down may get half
        assert torch.equal(value, back[name]), name  # the scale and twice the codes, but never other values


def test_backbone_alone(tensors, tmp_path):
    backbone = {name: value for name, value in tensors.items() if not name.startswith("mtp.")}
    config = export_checkpoint(backbone, without_drafter(CONFIG), tmp_path / "model")
    assert config.num_nextn_predict_layers == config.draft_length == 0
    verify_checkpoint(tmp_path / "model")


def test_refusals(tensors, exported, tmp_path):
    folder = tmp_path / "model"
    part = {name: value for name, value in tensors.items() if name != "layers.3.ffn.experts.w1"}
    with pytest.raises(ValueError, match=r"tensors: got no \['layers\.3\.ffn\.experts\.w1'\]"):
        export_checkpoint(part, CONFIG, folder)
    with pytest.raises(ValueError, match=r"tensors: got \['extra'\]"):
        export_checkpoint(tensors | {"extra": torch.zeros(1)}, CONFIG, folder)
    with pytest.raises(ValueError, match=r"experts\.w1: got shape \[7, 32, 128\], allowed is \[8, 32, 128\]"):
        wrong = {"layers.3.ffn.experts.w1": tensors["layers.3.ffn.experts.w1"][:7]}
        export_checkpoint(tensors | wrong, CONFIG, folder)
    with pytest.raises(ValueError, match=r"norm\.weight: got NaN or infinite values"):
        export_checkpoint(tensors | {"norm.weight": tensors["norm.weight"] * float("nan")}, CONFIG, folder)
    with pytest.raises(ValueError, match=r"config\.vocab_size: got 4096|embed\.weight"):
        export_checkpoint(tensors, replace(CONFIG, vocab_size=4096), folder)
    with pytest.raises(ValueError, match=r"tokenizer: got 512 ids, allowed is vocab_size \(600\)"):
        export_checkpoint(tensors, replace(CONFIG, vocab_size=600), folder, tokenizer=exported[0])
    assert not folder.exists()
    before = json.loads((exported[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=r"folder: got .*, which holds weights"):
        export_checkpoint(tensors, CONFIG, exported[0])
    assert json.loads((exported[0] / "config.json").read_text()) == before
