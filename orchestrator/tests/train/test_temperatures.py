"""Temperatures of the confidence head: fitted, written into config.json, used by the drafter."""

from __future__ import annotations

import json
import shutil

import pytest

from orchestrator.evaluate.sizes import SIZES, Sizes
from orchestrator.model.drafter import Drafter
from orchestrator.model.load import load_model
from orchestrator.train import temperatures
from orchestrator.train.temperatures import store_temperatures

TINY = Sizes(bits=0, replay={}, prompts=2, questions=2, output=8, recall={}, needle={}, prompt_tokens=40)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few prompts of a made-up text: the held-out texts alone take seconds to split into tokens."""
    monkeypatch.setitem(SIZES, "quick", TINY)
    text = "\n".join(f"def f{i}(x):\n    return x * {i} + {i % 7}\n" for i in range(300))
    monkeypatch.setattr(temperatures, "heldout_documents", lambda: [("made up", text)])


@pytest.fixture
def folder(nano_folder, tmp_path):
    return shutil.copytree(nano_folder, tmp_path / "model")


def test_five_numbers_are_stored_and_used(folder, nano_folder):
    before = json.loads((folder / "config.json").read_text())
    fitted = store_temperatures(folder, size="quick")
    assert len(fitted) == 5 and all(0.125 <= t <= 8 for t in fitted)
    after = json.loads((folder / "config.json").read_text())
    assert "dspark_confidence_temperatures" not in before["text_config"]
    assert after["text_config"].pop("dspark_confidence_temperatures") == list(fitted)
    assert after == before, "nothing else changes"
    for file in nano_folder.iterdir():
        if file.name != "config.json":
            assert (folder / file.name).read_bytes() == file.read_bytes()
    model = load_model(folder)
    assert model.config.dspark_confidence_temperatures == fitted
    assert Drafter(model).temperatures.tolist() == pytest.approx(fitted)


def test_a_second_fit_does_not_see_the_first(folder):
    first = store_temperatures(folder, size="quick")
    assert store_temperatures(folder, size="quick") == first


def test_a_model_without_stages_is_left_alone(tmp_path):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    folder = make_model(v41_nano(stages=0), tmp_path / "model", seed=1)
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"folder: .* without draft stages"):
        store_temperatures(folder, size="quick")
    assert (folder / "config.json").read_bytes() == before
