"""`fathom train` in pieces: every stage once, each call goes on where the last one ended."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from orchestrator.commands.errors import UsageError
from orchestrator.commands.train import TrainOptions, train
from orchestrator.model.checkpoint import Checkpoint
from orchestrator.train import drafter


@pytest.fixture(scope="module")
def nano_dataset(tmp_path_factory) -> Path:
    """A dataset folder for v41-nano made of this test's own text."""
    import tokenizers

    from orchestrator.model.engram_tables import EngramTables, compressed_vocab_size
    from orchestrator.model.presets import v41_nano
    from orchestrator.text.files import bundled_tokenizer

    folder, tokenizer, config = tmp_path_factory.mktemp("data"), bundled_tokenizer("v41-nano"), v41_nano()
    library = tokenizers.Tokenizer.from_str(tokenizer.text)
    size = compressed_vocab_size(library, config.vocab_size)
    tables = EngramTables.build(dataclasses.replace(config, engram_compressed_vocab_size=size), library)
    arrays = {"token_map": tables.token_map.numpy(), "mapped_pad": np.int64(tables.mapped_pad)}
    for number, layer in tables.layers.items():
        for part in ("multipliers", "primes", "offsets"):
            arrays[f"{part}.{number}"] = getattr(layer, part).numpy()
    np.savez(folder / "engram.npz", **arrays)
    text = [0, *tokenizer.encode(Path(__file__).read_text(encoding="utf-8")), 1]
    meta = {"vocab_size": 512}
    for part, count in (("train", 3), ("heldout", 1)):
        np.save(folder / f"{part}.npy", np.array(text * count, np.uint16))
        np.save(folder / f"{part}_starts.npy", np.arange(count) * len(text))
        meta[part] = {"tokens": len(text) * count, "bytes": 2 * len(text) * count, "documents": count}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def test_in_pieces(nano_dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drafter, "calibrate", lambda model, batches: [1.0, 1.1, 1.2, 1.3, 1.4], raising=False)
    options = TrainOptions(smoke=True, out=tmp_path / "run", data=nano_dataset, device="cpu", steps=4, drafter_steps=2)
    for stage in ("drafter", "export"):
        with pytest.raises(ValueError, match=f"{stage}: .* has no finished backbone; run that stage first"):
            train(dataclasses.replace(options, stages=(stage,)))
    assert train(dataclasses.replace(options, minutes=0.11)) == 0  # too little for a step
    assert "Stopped at step 0 of 4 of the backbone stage" in capsys.readouterr().err
    assert train(dataclasses.replace(options, stages=("data", "backbone"))) == 0
    first = (tmp_path / "run/backbone.state").read_bytes()
    (tmp_path / "run/backbone.state").unlink()  # as on a machine that got the compact snapshot only
    assert train(options) == 0
    said = capsys.readouterr().err
    assert "drafter: done, 2 steps" in said and "Try it: fathom generate" in said
    assert not (tmp_path / "run/backbone.state").exists()  # it was not trained again

    assert Checkpoint(tmp_path / "run/model").config.num_nextn_predict_layers == 3
    card = (tmp_path / "run/model/README.md").read_text()
    assert "| backbone | 4 |" in card and "| drafter | 2 |" in card and str(tmp_path) not in card
    assert (tmp_path / "run/model/curves-drafter.svg").is_file()
    from orchestrator.engine.llm import LLM
    from orchestrator.engine.request import SamplingParams

    assert LLM(tmp_path / "run/model").generate(["def f("], SamplingParams(max_tokens=2))

    (tmp_path / "run/backbone.state").write_bytes(first)
    assert train(dataclasses.replace(options, steps=5, stages=("backbone",))) == 0  # more steps: goes on
    assert json.loads((tmp_path / "run/run.json").read_text())["stages"]["backbone"]["steps"] == 5
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="holds weights that this run did not write"):
        train(dataclasses.replace(options, stages=("export",), export_to=foreign))
    with pytest.raises(ValueError, match="seed: got 1, allowed is 0, with which"):
        train(dataclasses.replace(options, seed=1))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"name": "v41-flash"}, "NAME: got 'v41-flash', allowed is v41-mini or v41-nano"),
        ({"stages": ("data", "all")}, "--stages: got all, allowed is any of data,backbone,drafter,export"),
        ({"steps": 0}, "--steps: got 0"),
        ({"minutes": 0.0}, "--minutes: got 0.0"),
        ({"lr": float("nan")}, "--lr: got nan"),
        ({"device": "tpu"}, "--device: got 'tpu', allowed here is cpu"),
        ({"stages": ("backbone",)}, "holds no dataset; run the data stage, or give --data FOLDER"),
    ],
)
def test_usage(tmp_path, wrong, told):
    with pytest.raises(UsageError) as error:
        train(TrainOptions(**{"out": tmp_path / "run", **wrong}))
    assert told in str(error.value)
    assert not (tmp_path / "run").exists()


def test_other_vocabulary(nano_dataset, tmp_path):
    with pytest.raises(UsageError, match="was made for a vocabulary of 512, v41-mini has 4096"):
        train(TrainOptions(out=tmp_path, data=nano_dataset, stages=("backbone",)))
