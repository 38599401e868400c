"""The drafter against the float64 oracle, and what its state may and may not depend on."""

from __future__ import annotations

import random

import pytest
import torch
from oracle import Oracle
from oracle.drafter import Drafter as OracleDrafter

from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.drafter import Drafter, log_distribution
from orchestrator.model.engram_tables import token_map_of
from orchestrator.model.taps import Taps


@pytest.fixture(scope="module")
def oracle(nano_path):
    vocab = Oracle(nano_path, token_map=[]).config.vocab_size
    return Oracle(nano_path, token_map=token_map_of(nano_path / "tokenizer.json", vocab).numpy())


def tokens_for(model, count: int, seed: int = 5) -> list[int]:
    return [random.Random(seed).randrange(model.config.vocab_size) for _ in range(count)]


def feed(model, drafter, cache, tokens, start, end, *, slot=1, decoder_lower=0):
    """Positions start..end - 1 through the target and into the context rings; returns the step's taps."""
    chunk = Chunk(
        tokens=tokens[start:end],
        start=start,
        slot=slot,
        blocks=[1 + 8 * (slot - 1) + i for i in range(-(-end // 128))],
        history=tokens[max(0, start - 3) : start],
        decoder_lower=decoder_lower,
    )
    taps = Taps(model.config)
    model.forward(StepBatch.build([chunk], model.ratios), cache, None, taps)
    drafter.context(taps, cache)
    return taps


def cache_for(model, *, quantised: bool = True) -> CachePools:
    return CachePools(model.config, 20, 4, quantised=quantised, draft_stages=model.config.num_nextn_predict_layers)


def block_of(drafter, cache, anchors, positions, slots):
    return drafter.block(torch.tensor(anchors), torch.tensor(positions), torch.tensor(slots, dtype=torch.int32), cache)


def given(tokens):
    """A chooser that takes the rows of `tokens` int64 [B, δ]."""
    return lambda k, logits: tokens[:, k]


@pytest.mark.parametrize("length", [1, 3, 31, 32, 150])
def test_unquantised_drafts_agree(nano, oracle, length):
    tokens = tokens_for(nano, length)
    drafter, cache = Drafter(nano), cache_for(nano, quantised=False)
    for start in range(0, length, 64):
        feed(nano, drafter, cache, tokens, start, min(length, start + 64))
    judge = OracleDrafter(oracle, cache="float")
    context = judge.context(oracle.forward(tokens, cache="float"))
    block = block_of(drafter, cache, [7], [length], [1])
    expected = judge.draft(context, length - 1, anchor=7)
    got = drafter.choose(block, given(torch.from_numpy(expected.tokens)[None]))
    assert abs(block.logits[0].numpy() - expected.base_logits).max() <= 1e-4
    assert abs(got.log_q[0].exp().numpy() - _softmax(expected.logits)).max() <= 1e-4
    assert abs(got.confidence[0].numpy() - expected.confidence).max() <= 1e-4


def test_drafts_over_quantised_rings_agree(nano, oracle):
    """The oracle drafts from the engine's own ring bytes, since one code rounded the other way would hide an error."""
    length = 150
    tokens = tokens_for(nano, length)
    drafter, cache = Drafter(nano), cache_for(nano)
    feed(nano, drafter, cache, tokens, 0, length)
    judge = OracleDrafter(oracle)
    trace = oracle.forward(tokens)
    context = judge.context(trace)
    ring = torch.arange(length - nano.config.ring_rows, length)
    rows = [cache.rings[layer, 1, ring % nano.config.ring_rows].numpy() for layer in drafter.layers]
    context = type(context)(ring.numpy(), rows)
    expected = judge.draft(context, length - 1, anchor=7)
    got = drafter.choose(block_of(drafter, cache, [7], [length], [1]), given(torch.from_numpy(expected.tokens)[None]))
    assert abs(got.log_q[0].exp().numpy() - _softmax(expected.logits)).max() <= 1e-4


def test_context_rows_are_those_of_the_oracle(nano, oracle):
    """Taps in, stored codes out: all but a rounding error's worth of codes are the same."""
    length = 60
    tokens = tokens_for(nano, length)
    drafter, cache = Drafter(nano), cache_for(nano, quantised=False)
    taps = feed(nano, drafter, cache, tokens, 0, length)
    trace = oracle.forward(tokens, cache="float")
    assert abs(taps.values.numpy() - trace.taps).max() <= 1e-4 * abs(trace.taps).max()
    context = OracleDrafter(oracle, cache="float").context(trace)
    kept = torch.arange(length - nano.config.ring_rows, length)
    for layer, expected in zip(drafter.layers, context.rows, strict=True):
        got = cache.rings[layer, 1, kept % nano.config.ring_rows].numpy()
        assert abs(got - expected[kept]).max() <= 1e-4


def test_chunks_neighbours_and_rejected_drafts_change_no_bit(nano):
    tokens, others = tokens_for(nano, 151), tokens_for(nano, 90, seed=6)
    drafter = Drafter(nano)
    alone, mixed = cache_for(nano), cache_for(nano)
    feed(nano, drafter, alone, tokens, 0, 150)
    for start in range(0, 144, 36):
        feed(nano, drafter, mixed, tokens, start, start + 36)
    wrong = [*tokens[:144], *tokens_for(nano, 6, seed=9)]
    feed(nano, drafter, mixed, wrong, 144, 150)  # a verification of which nothing was accepted
    feed(nano, drafter, mixed, tokens, 144, 150)
    feed(nano, drafter, mixed, others, 0, 90, slot=2)
    rings = mixed.rings.clone()
    seeds, hot = torch.tensor([4, 3]), torch.ones(2)
    both = drafter.draft(
        torch.tensor([5, 7]), torch.tensor([90, 150]), torch.tensor([2, 1], dtype=torch.int32), mixed, hot, seeds
    )
    assert mixed.rings.equal(rings), "a block left rows behind"
    one = drafter.draft(
        torch.tensor([7]), torch.tensor([150]), torch.tensor([1], dtype=torch.int32), alone, hot[1:], seeds[1:]
    )
    assert one.tokens[0].equal(both.tokens[1])
    assert one.log_q[0].equal(both.log_q[1]) and one.confidence[0].equal(both.confidence[1])


def test_a_decoder_tail_is_all_that_drafts_need(nano):
    """Rows below the tail write no context, and a block at the prompt's end does not look there."""
    length = 4 * nano.config.keep_tokens
    tokens, lower = tokens_for(nano, length), length - nano.config.keep_tokens
    drafter, cache = Drafter(nano), cache_for(nano)
    cache.rings.fill_(0x7F)  # NaN codes
    feed(nano, drafter, cache, tokens, 0, length, decoder_lower=lower)
    assert block_of(drafter, cache, [7], [length], [1]).logits.isfinite().all()


def test_temperature_zero_is_a_point_and_draws_follow_log_q(nano):
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 1.0, 2.0]])
    log_q = log_distribution(logits, torch.tensor([0.0, 0.5]))
    assert log_q[0].exp().tolist() == [0.0, 1.0, 0.0]
    assert torch.allclose(log_q[1], (logits[1] / 0.5).log_softmax(-1))

    drafter, cache = Drafter(nano), cache_for(nano)
    feed(nano, drafter, cache, tokens_for(nano, 40), 0, 40)
    count = 4000
    drafts = drafter.draft(
        torch.full((count,), 7),
        torch.full((count,), 40),
        torch.ones(count, dtype=torch.int32),
        cache,
        torch.ones(count),
        torch.arange(count),
    )
    seen = torch.bincount(drafts.tokens[:, 0], minlength=nano.config.vocab_size) / count
    expected = drafts.log_q[0, 0].exp()
    assert (seen - expected).abs().max() <= 5 * (expected.max() / count).sqrt()


def test_confidence_temperatures_divide_the_logits(nano):
    from types import SimpleNamespace

    class Calibrated(SimpleNamespace):
        """The model's configuration with temperatures, whether or not it has a field for them."""

        def __getattr__(self, name):
            return getattr(nano.config, name)

    model = SimpleNamespace(**vars(nano))
    model.config = Calibrated(dspark_confidence_temperatures=(0.5, 1.0, 2.0, 4.0, 1e-6))
    cache = cache_for(nano)
    feed(nano, Drafter(nano), cache, tokens_for(nano, 40), 0, 40)
    plain, scaled = (
        d.choose(block_of(d, cache, [7], [40], [1]), given(torch.ones(1, 5, dtype=torch.int64)))
        for d in (Drafter(nano), Drafter(model))
    )
    assert scaled.confidence_logits.equal(plain.confidence_logits)
    logit = torch.logit(scaled.confidence[0, :4].double())
    assert torch.allclose(logit, (plain.confidence_logits[0] / torch.tensor([0.5, 1, 2, 4, 1]))[:4].double(), atol=1e-4)
    assert scaled.confidence[0, 4] in (torch.tensor(60.0).sigmoid(), torch.tensor(-60.0).sigmoid())
    model.config = Calibrated(dspark_confidence_temperatures=(1.0, 1.0))
    with pytest.raises(ValueError, match="dspark_confidence_temperatures: got 2"):
        Drafter(model)


def test_a_model_without_stages_is_refused(nano):
    from types import SimpleNamespace

    empty = SimpleNamespace(config=nano.config, weights=SimpleNamespace(drafter=None))
    with pytest.raises(ValueError, match="draft stages"):
        Drafter(empty)
    with pytest.raises(ValueError, match="draft_stages"):
        block_of(Drafter(nano), CachePools(nano.config, 4, 4), [1], [1], [1])


def _softmax(x):
    return torch.from_numpy(x).softmax(-1).numpy()
