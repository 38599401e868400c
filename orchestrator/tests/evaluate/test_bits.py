"""Bits per byte of every way to run the model."""

from __future__ import annotations

import math

import pytest
import torch

from orchestrator.evaluate.bits import SCORED, _after_prompt, _nats, model_bits, replay_bits
from orchestrator.evaluate.feed import Bounds, Feeder, Piece
from orchestrator.evaluate.text import Window


def logits_of(model, tokens):
    return Feeder(model, 1, len(tokens)).run(Piece(0, tokens, 0, len(tokens)), chunk=100)


def test_the_engine_is_scored_on_every_token_but_the_first(nano, heldout):
    windows = heldout.windows(3, 200)
    engine, unquantised, every_row = model_bits(nano, windows)
    nats = sum(float(_nats(logits_of(nano, w.tokens)[:-1], w.tokens[1:]).sum()) for w in windows)
    size = sum(sum(w.bytes[1:]) for w in windows)
    assert engine.bits_per_byte == pytest.approx(nats / math.log(2) / size)
    assert engine.bytes == size and engine.tokens == 3 * 199 and engine.ratio == 1
    for row in (unquantised, every_row):  # 200 tokens are more rows than a selection holds
        assert row.ratio != 1 and row.ratio == pytest.approx(1, abs=0.2)


def test_a_reference_that_is_the_engine_has_no_loss(nano, heldout):
    windows = heldout.windows(2, 200)
    done = []
    rows = model_bits(nano, windows, reference=lambda t: logits_of(nano, t.tolist()), tick=done.append)
    reference = {r.name: r for r in rows}["reference"]
    assert reference.ratio == pytest.approx(1) and reference.ratio_stderr == pytest.approx(0, abs=1e-9)
    assert sum(done) == 4 * 2 * 200

    rows = model_bits(nano, windows, reference=lambda t: torch.zeros(len(t), nano.config.vocab_size))
    uniform = {r.name: r for r in rows}["reference"]
    assert uniform.bits_per_byte == pytest.approx(9 * uniform.tokens / uniform.bytes)  # 512 tokens


def test_selections_that_hold_every_row_change_nothing(nano, heldout):
    short = heldout.windows(2, nano.config.index_topk)
    rows = {r.name: r for r in model_bits(nano, short)}
    assert rows["every row read"].ratio == 1 and rows["every row read"].bits_per_byte == rows["engine"].bits_per_byte


def test_decoder_replay_within_its_reach_is_exact(nano, heldout):
    keep = nano.config.keep_tokens
    window = heldout.windows(1, keep + 60)[0]
    exact = _nats(logits_of(nano, window.tokens)[:-1], window.tokens[1:])
    within = _after_prompt(Feeder(nano, 1, keep + 60), window, keep)
    assert within.equal(exact[keep - 1 :])
    longer = heldout.windows(1, 4 * keep)[0]
    exact = _nats(logits_of(nano, longer.tokens)[:-1], longer.tokens[1:])
    assert not _after_prompt(Feeder(nano, 1, 4 * keep), longer, 3 * keep).equal(exact[3 * keep - 1 :])


@pytest.mark.parametrize("hit", [128, 384])
def test_after_a_hit_the_suffix_is_scored_against_the_cold_run(nano, heldout, hit):
    windows = heldout.windows(2, hit + SCORED)
    rows = {r.name: r for r in replay_bits(nano, windows, hit)}
    assert list(rows) == ["exact", "decoder replay", "hit", "hit, decoder replay"]
    assert rows["exact"].tokens == rows["hit"].tokens == 2 * (SCORED - 1)
    assert rows["decoder replay"].tokens == 2 * (SCORED - 128)
    for row in rows.values():  # windows were poisoned with NaN: nothing of the cold run's is read
        assert math.isfinite(row.bits_per_byte) and row.ratio == pytest.approx(1, abs=0.2)
    assert rows["exact"].ratio == 1 and rows["hit"].ratio != 1
    whole = [_nats(logits_of(nano, w.tokens)[hit:-1], w.tokens[hit + 1 :]) for w in windows]
    size = sum(sum(w.bytes[hit + 1 :]) for w in windows)
    assert rows["exact"].bits_per_byte == pytest.approx(float(sum(n.sum() for n in whole)) / math.log(2) / size)


def test_a_hit_leaves_the_global_rows_before_it_alone(nano, heldout):
    hit, window = 256, heldout.windows(1, 256 + SCORED)[0]
    feeder = Feeder(nano, 1, hit + SCORED)
    feeder.run(Piece(0, window.tokens, 0, hit, logits="none"))
    before = feeder.cache.save_blocks(feeder.blocks(0)[:2])
    feeder.forget_windows(0)
    start = hit - nano.config.sliding_window
    feeder.run(Piece(0, window.tokens, start, hit + SCORED, "all", Bounds(start, start, hit)), chunk=77)
    for layer, rows in feeder.cache.save_blocks(feeder.blocks(0)[:2]).items():
        assert all(now.equal(then) for now, then in zip(rows, before[layer], strict=True))


def test_windows_of_another_length_are_refused(nano):
    window = Window("a", (0,) * 300, (1,) * 300)
    with pytest.raises(ValueError, match="windows: got 300"):
        replay_bits(nano, [window], 128)
    with pytest.raises(ValueError, match="windows: got lengths"):
        model_bits(nano, [window, Window("b", (0,) * 200, (1,) * 200)])
