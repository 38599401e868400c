"""The training path as a judge of the engine, straight from a checkpoint folder."""

from __future__ import annotations

import torch

from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.train.reference import load_reference, reference_logits

LENGTH = 201  # no multiple of the window


def tokens_for(config, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, config.vocab_size, (length,), generator=torch.Generator().manual_seed(6))


def test_float32_is_the_engine(nano_folder, engine):
    tokens = tokens_for(engine.config)
    cache = CachePools(engine.config, 3, 2, quantised=False)
    chunk = Chunk(tokens.tolist(), 0, 1, [1, 2], logits="all")
    expected = engine.forward(StepBatch.build([chunk], engine.ratios), cache)
    logits = reference_logits(nano_folder, dtype=torch.float32)
    got = logits(tokens)
    assert got.shape == (LENGTH, engine.config.vocab_size) and got.dtype == torch.float32
    assert not got.requires_grad
    assert (got - expected).abs().max() < 1e-4
    for length in (1, 31, 32, 33):
        assert (logits(tokens[:length]) - expected[:length]).abs().max() < 1e-4


def test_bfloat16_is_near(nano_folder, engine):
    tokens = tokens_for(engine.config, 100)
    exact, rounded = (reference_logits(nano_folder, dtype=d)(tokens) for d in (torch.float32, torch.bfloat16))
    assert rounded.dtype == torch.float32
    difference = (exact - rounded)[:16].abs()  # later rows may select others
    assert 0 < difference.mean() < 0.05 * exact.std()


def test_the_weights_are_the_stored_ones(nano_folder, imported):
    model = load_reference(nano_folder, dtype=torch.float32)
    assert not model.training and not any(v.requires_grad for v in model.tensors().values())
    assert all(value.equal(imported[name]) for name, value in model.tensors().items())
    assert model.dtype == torch.float32 and load_reference(nano_folder).dtype == torch.bfloat16
