"""Small models to train: one of three parameters with a dataset, and a random v41-nano with the engine that runs it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

VOCABULARY = 32


class FakeModel:
    """A bigram model with noise from the global generator, so that resuming has to restore that too."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.3)  # noqa: E731
        self.values = {
            "embed.weight": draw(VOCABULARY, 8),
            "layers.0.ffn.experts.w1": draw(3, 6, 8),
            "layers.0.ffn.experts.w2": draw(3, 8, 6),
            "norm.weight": draw(8),
            "head.weight": draw(VOCABULARY, 8),
            "layers.0.ffn.gate.bias": torch.zeros(3),
        }
        self.fail_at: tuple[int, ...] | range = ()
        self.before_step = lambda step: None

    def tensors(self):
        return self.values

    def matrices(self):
        return {"layers.0.ffn.experts.w1": (3, 6, 8), "layers.0.ffn.experts.w2": (3, 8, 6)}

    def lr_scales(self):
        return {"embed.weight": 2.0}

    def loss(self, tokens, phase, step):
        self.before_step(step)
        x = self.values["embed.weight"][tokens[:, :-1]]
        x = x + 0.01 * torch.rand(x.shape)
        x = (
            x
            + (x @ self.values["layers.0.ffn.experts.w1"].mean(0).T) @ self.values["layers.0.ffn.experts.w2"].mean(0).T
        )
        logits = (x * self.values["norm.weight"]) @ self.values["head.weight"].T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if step in self.fail_at:
            loss = loss * float("nan")
        return loss, {"ce": loss.detach()}

    def after_step(self, progress):
        self.values["layers.0.ffn.gate.bias"] += 0.5 + progress


@pytest.fixture
def new_model():
    """`new_model(seed=0)` makes the model."""
    return FakeModel


@pytest.fixture
def dataset(tmp_path):
    """A folder with 5000 training and 900 held-out tokens; token i of the text is a function of i."""
    folder = tmp_path / "data"
    folder.mkdir()
    for part, count in (("train", 5000), ("heldout", 900)):
        np.save(folder / f"{part}.npy", (np.arange(count) * 7 // 3 % VOCABULARY).astype(np.uint16))
        np.save(folder / f"{part}_starts.npy", np.arange(0, count, 130, dtype=np.int64))
    return folder


@pytest.fixture(scope="session")
def nano_folder(tmp_path_factory):
    """A random v41-nano with the tokenizer of its size."""
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    return make_model(v41_nano(), tmp_path_factory.mktemp("v41-nano"), seed=20)


@pytest.fixture(scope="session")
def engine(nano_folder):
    """The inference side of `nano_folder`."""
    from orchestrator.model.load import load_model

    return load_model(nano_folder)


@pytest.fixture(scope="session")
def imported(nano_folder):
    """The training side's values of `nano_folder`, draft stages included; not to be changed."""
    from orchestrator.train.export import import_checkpoint

    return import_checkpoint(nano_folder)


@pytest.fixture
def new_backbone(engine, imported):
    """`new_backbone()` is a `TrainModel` with the weights of `nano_folder`, float32."""
    from orchestrator.train.model import TrainModel

    def make():
        model = TrainModel(engine.config, engine.tables.arrays())
        with torch.no_grad():
            for name, value in model.tensors().items():
                value.copy_(imported[name])
        return model

    return make


@pytest.fixture
def fresh_backbone(engine):
    """A `TrainModel` as training starts it."""
    from orchestrator.train.model import TrainModel

    return TrainModel(engine.config, engine.tables.arrays(), seed=1)
