"""The differentiable model is the engine's model: logits, stored rows, decoder replay; and it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernel_core.formats import dequantize_index, dequantize_main, dequantize_window
from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.record import Recorder, StepRecorder
from orchestrator.model.taps import Taps
from orchestrator.train import block, compressed
from orchestrator.train import model as train_model
from orchestrator.train.graphs import CapturedGradients
from orchestrator.train.lookup import lookup
from orchestrator.train.model import TrainModel
from orchestrator.train.optimizer import Optimizer
from orchestrator.train.phases import Phase

LENGTH = 256
EXACT = Phase(1.0, LENGTH, 1, quantised=False)
STORED = Phase(1.0, LENGTH, 1, quantised=True)
DENSE = Phase(1.0, LENGTH, 1, sparse=False, quantised=False)
REPLAY = Phase(1.0, LENGTH, 1, replay=True)


def tokens_for(config, rows: int = 1, length: int = LENGTH, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (rows, length), generator=generator)


def run_engine(engine, tokens, *, quantised=False, decoder_lower=0, recorder=None, taps=None):
    """Logits of every row that the decoder computes, in one step."""
    blocks = list(range(1, 1 + -(-len(tokens) // 128)))
    cache = CachePools(engine.config, len(blocks) + 1, 2, quantised=quantised)
    chunk = Chunk(tokens.tolist(), 0, 1, blocks, decoder_lower=decoder_lower, logits="all")
    step = None if recorder is None else StepRecorder({0: recorder})
    return engine.forward(StepBatch.build([chunk], engine.ratios), cache, step, taps)


@torch.no_grad()
def run_train(model, tokens, phase=EXACT, lower=None):
    hidden = model(tokens, phase, lower).hidden
    return hidden @ model.get("head.weight").T


def test_logits_are_those_of_the_engine(engine, new_backbone):
    tokens = tokens_for(engine.config, rows=2)
    logits = run_train(new_backbone(), tokens)
    for row, ours in zip(tokens, logits, strict=True):
        theirs = run_engine(engine, row)
        assert ours.std() > 0.3 and (ours - theirs).abs().max() < 1e-4


def test_the_selection_matters(engine, new_backbone):
    """Else the agreement above would say nothing of it."""
    model, tokens = new_backbone(), tokens_for(engine.config)
    sparse, dense = run_train(model, tokens), run_train(model, tokens, DENSE)
    few = engine.config.index_topk  # rows of ratio 1: up to here all are selected
    assert (sparse - dense)[:, :few].abs().max() < 1e-4
    assert (sparse - dense)[:, few:].abs().max() > 1e-2


def test_taps_are_those_of_the_engine(engine, new_backbone):
    tokens, taps = tokens_for(engine.config), Taps(engine.config)
    run_engine(engine, tokens[0], taps=taps)
    with torch.no_grad():
        ours = new_backbone()(tokens, EXACT, taps=True).taps[0]
    assert ours.shape == taps.values.shape
    assert (ours - taps.values).abs().max() < 1e-4 * taps.values.abs().max()


def test_stored_rows_are_those_of_the_engine(engine, new_backbone, monkeypatch):
    """Codes differ where a value lies on a rounding boundary, and later layers read what came of that."""
    config, tokens, recorder = engine.config, tokens_for(engine.config), Recorder()
    theirs = run_engine(engine, tokens[0], quantised=True, recorder=recorder)
    recorded = recorder.export()
    kept: dict[str, list[torch.Tensor]] = {"window": [], "main": [], "index": []}
    stored = block.stored

    def spy(x, kind, dtype, *, quantised):
        result = stored(x, kind, dtype, quantised=quantised)
        if x.dim() == 2:  # index queries, with a dimension of heads, are not stored
            kept[kind].append(result)
        return result

    monkeypatch.setattr(block, "stored", spy)
    ours = run_train(new_backbone(), tokens, STORED)[0]
    decode = {"window": dequantize_window, "main": dequantize_main, "index": dequantize_index}
    layers = {"window": range(config.num_hidden_layers), "main": config.kv_source_layer_ids}
    layers["index"] = config.kv_source_layer_ids
    differing = {}
    for kind, rows in kept.items():
        assert len(rows) == len(layers[kind])
        for layer, row in zip(layers[kind], rows, strict=True):
            expected = decode[kind](recorded[f"{kind}/{layer}"])
            assert row.shape == expected.shape
            differing[f"{kind}/{layer}"] = float((row != expected).float().mean())
    assert max(share for key, share in differing.items() if key in ("window/0", "main/2", "index/2")) < 1e-3
    assert max(differing.values()) < 0.05, differing
    assert (ours - theirs)[:16].abs().max() < 1e-4
    assert (ours - theirs).abs().mean() < 0.02 * theirs.std()


def test_index_scores_are_those_of_the_engine(engine, new_backbone, monkeypatch):
    """Their scale moves no selection, but a loss that is a softmax of them."""
    config, tokens, recorder = engine.config, tokens_for(engine.config, length=128), Recorder(analysis=True)
    run_engine(engine, tokens[0], recorder=recorder)
    recorded, kept = recorder.export(), []

    def learning(scores, allowed, mass):
        kept.append(scores[0])
        return scores.sum()

    monkeypatch.setattr(compressed, "index_loss", learning)
    run_train(new_backbone(), tokens)
    for layer, scores in zip(config.index_source_layer_ids, kept, strict=True):
        q, heads = recorded[f"index_query/{layer}"], recorded[f"index_heads/{layer}"]
        keys = recorded[f"index_values/{config.kv_source(layer)}"]
        expected = (torch.einsum("thd,gd->thg", q, keys).relu() * heads[..., None]).sum(1)
        last = scores[-1]  # sees every row
        assert last.shape == expected[-1].shape
        assert (last - expected[-1]).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("length", [160, 224])
def test_decoder_replay_is_that_of_a_prompt(engine, new_backbone, length):
    """The decoder of a prompt starts `keep_tokens` before its end and sees no window row before that."""
    config = engine.config
    tokens, begin = tokens_for(config, length=length), length - config.keep_tokens
    lower = torch.where(torch.arange(length) >= begin, begin, 0)[None]
    theirs = run_engine(engine, tokens[0], decoder_lower=begin)
    assert len(theirs) == config.keep_tokens
    model = new_backbone()
    ours = run_train(model, tokens, EXACT, lower)[0]
    assert (ours[begin:] - theirs).abs().max() < 1e-4
    assert (run_train(model, tokens)[0, begin:] - theirs).abs().max() > 1e-2, "a replay changes logits"
    assert ours[:begin].equal(run_train(model, tokens)[0, :begin])


def test_hash_rows_are_those_of_mhc_engram(engine, new_backbone):
    from mhc_engram import engram_rows

    model, config = new_backbone(), engine.config
    tokens = tokens_for(config, rows=3, length=64)
    tokens[1, 10:30] = config.engram_pad_token_id
    tables = engine.tables
    orders = config.engram_max_ngram_size - 1
    for layer in config.engram_layer_ids:
        constants = tables.layer(layer)
        expected = engram_rows(
            tables.token_map[tokens].flatten(),
            torch.zeros(tokens.numel(), dtype=torch.bool),
            torch.full((3, orders), -1, dtype=torch.int64),
            torch.arange(0, 193, 64, dtype=torch.int32),
            constants.multipliers,
            constants.primes,
            constants.offsets,
            tables.mapped_pad,
        )
        got = model.hash.rows(layer, tokens)
        assert got.flatten(0, 1).equal(expected)
        assert got.min() >= 0 and got.max() < config.engram_rows(layer)


def test_the_constants_may_come_from_a_file(engine, tmp_path):
    path = tmp_path / "engram.npz"
    np.savez(path, **engine.tables.arrays())
    tokens = tokens_for(engine.config)
    model, other = TrainModel(engine.config, path), TrainModel(engine.config, engine.tables.arrays())
    assert model.hash.rows(1, tokens).equal(other.hash.rows(1, tokens))


@pytest.mark.parametrize("size", [511, 4096])
def test_a_map_of_another_vocabulary_is_refused(engine, size):
    constants = engine.tables.arrays() | {"token_map": np.arange(size)}
    with pytest.raises(ValueError, match=rf"token map of {size} ids, allowed is vocab_size \(512\)"):
        TrainModel(engine.config, constants)


@pytest.mark.parametrize("phase", [DENSE, STORED, REPLAY], ids=["dense", "sparse and quantised", "replay"])
def test_every_parameter_gets_a_gradient(fresh_backbone, phase):
    tokens = tokens_for(fresh_backbone.config, rows=2, length=LENGTH + 1)
    loss, metrics = fresh_backbone.loss(tokens, phase, 0)
    assert set(metrics) == {"ce", "index", "balance", "recall"}
    assert all(value.isfinite() and not value.requires_grad for value in metrics.values())
    assert abs(metrics["ce"] - np.log(512)) < 0.5 and metrics["balance"] >= 0.99 and metrics["index"] > 0
    assert (metrics["recall"] == 0) == (not phase.sparse) and metrics["recall"] < 1
    loss.backward()
    tensors = fresh_backbone.tensors()
    without = {n for n, v in tensors.items() if v.grad is None or not v.grad.any()}
    assert without == {n for n in tensors if n.endswith(("gate.bias", "gate.bias_vl"))}
    assert all(v.grad.isfinite().all() for v in tensors.values() if v.grad is not None)


def test_the_indexer_learns_from_its_own_loss_alone(fresh_backbone):
    """Cross-entropy gives the indexer no gradient, and its loss gives nothing else one."""
    tokens = tokens_for(fresh_backbone.config, length=128)
    out = fresh_backbone(tokens, STORED)
    out.index_loss.backward(retain_graph=True)
    reached = {n for n, v in fresh_backbone.tensors().items() if v.grad is not None and v.grad.any()}
    own = {n for n in fresh_backbone.tensors() if ".indexer." in n}
    assert reached == own and own
    fresh_backbone.zero_grad()
    out.hidden.square().sum().backward()
    reached = {n for n, v in fresh_backbone.tensors().items() if v.grad is not None and v.grad.any()}
    assert not reached & own and "embed.weight" in reached


def test_an_indexer_learns_from_all_layers_that_use_its_selection(fresh_backbone, monkeypatch):
    masses, lessons = [], []
    attend, loss = train_model.sparse_attention, compressed.index_loss

    def attending(*args):
        out, mass = attend(*args)
        masses.append(mass)
        return out, mass

    def learning(scores, allowed, mass):
        lessons.append((mass, loss(scores, allowed, mass)))
        return lessons[-1][1]

    monkeypatch.setattr(train_model, "sparse_attention", attending)
    monkeypatch.setattr(compressed, "index_loss", learning)
    config = fresh_backbone.config
    out = fresh_backbone(tokens_for(config, rows=2, length=96), STORED)
    sources = [*config.index_source_layer_ids, config.num_hidden_layers]
    assert len(lessons) == len(sources) - 1
    for first, after, (mass, _) in zip(sources, sources[1:], lessons, strict=False):
        assert torch.allclose(mass, sum(masses[first:after]))
    assert torch.allclose(out.index_loss, torch.stack([value for _, value in lessons]).mean())


def test_what_follows_changes_nothing(engine, new_backbone):
    model, tokens = new_backbone(), tokens_for(engine.config, length=128)
    changed = tokens.clone()
    changed[:, 77:] = tokens_for(engine.config, length=128, seed=9)[:, 77:]
    a, b = run_train(model, tokens, STORED), run_train(model, changed, STORED)
    assert (a - b)[:, :77].abs().max() < 1e-5 and (a - b)[:, 77:].abs().max() > 0.1


def test_sequences_of_a_batch_do_not_meet(engine, new_backbone):
    model, tokens = new_backbone(), tokens_for(engine.config, rows=2, length=128)
    both = run_train(model, tokens)
    for i in range(2):
        assert (both[i] - run_train(model, tokens[i : i + 1])[0]).abs().max() < 1e-5


def test_loss_falls(fresh_backbone):
    """Ten steps of the real optimizer on one sequence."""
    tokens = tokens_for(fresh_backbone.config, length=65)
    phase = Phase(1.0, 64, 1, replay=True)
    optimizer = Optimizer(fresh_backbone, lr=1e-2)
    losses = []
    for step in range(10):
        loss, metrics = fresh_backbone.loss(tokens, phase, step)
        losses.append(metrics["ce"].item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        fresh_backbone.after_step(step / 10)
    assert losses[-1] < 0.05 * losses[0] and optimizer.skipped == 0


def test_router_bias_moves_against_the_load(fresh_backbone):
    model = fresh_backbone
    biases = [model.get(f"layers.{i}.ffn.gate.bias") for i in range(model.config.num_hidden_layers)]
    model.loss(tokens_for(model.config, length=65), Phase(1.0, 64, 1), 0)
    load = model.load.clone()
    assert (load.sum(-1) == 64 * model.config.num_experts_per_tok).all()
    model.after_step(0.5)
    for bias, counts in zip(biases, load, strict=True):
        assert torch.allclose(bias, torch.sign(counts.mean() - counts) * (5e-3 + 1e-4))
        assert bias[counts.argmax()] < 0 < bias[counts.argmin()]
    assert not model.load.any()
    with torch.no_grad():
        model.loss(tokens_for(model.config, length=65), Phase(1.0, 64, 1), 0)
    assert not model.load.any(), "an evaluation is not counted"


def test_a_bias_changes_the_choice_and_not_the_weight():
    """An expert that its bias brings in is weighted by its score without the bias."""
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    weights, chosen, s = block._route(scores, bias, 2, 1.5)
    assert chosen.tolist() == [[1, 0, 0, 1]]
    expected = 1.5 * s * chosen / (s[0, 0] + s[0, 3])
    assert torch.allclose(weights, expected)


def test_lookup_is_an_embedding():
    table = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    index = torch.tensor([[0, 3, 3], [6, 3, 0]])
    upstream = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    assert lookup(table, index).equal(F.embedding(index, table))
    (got,) = torch.autograd.grad(lookup(table, index), table, upstream)
    (wanted,) = torch.autograd.grad(F.embedding(index, table), table, upstream)
    assert torch.allclose(got, wanted) and not got[[1, 2, 4, 5]].any()
    half = table.detach().bfloat16().requires_grad_()
    many = torch.zeros(4096, dtype=torch.int64)  # a bfloat16 sum would stop at 256
    assert torch.autograd.grad(lookup(half, many).sum(), half)[0][0].tolist() == [4096.0] * 5


def test_a_graph_that_cannot_be_captured_is_reported_once(fresh_backbone, monkeypatch, capsys):
    model, tokens = fresh_backbone, tokens_for(fresh_backbone.config, length=65)
    attempts = []

    def refuse(self, *args):
        attempts.append(args)
        raise RuntimeError("loss and gradient norm differ")

    monkeypatch.setattr(CapturedGradients, "_capture", refuse)
    gradients = CapturedGradients(model)
    phase = Phase(1.0, 64, 1)
    for step in range(2):
        loss, metrics = gradients(tokens, phase, step)
    assert len(attempts) == 1
    assert capsys.readouterr().err == "going on without a CUDA graph: loss and gradient norm differ\n"
    got = {n: v.grad.clone() for n, v in model.tensors().items() if v.requires_grad}
    assert not loss.requires_grad and metrics["ce"] > 0
    model.zero_grad()
    expected, _ = model.loss(tokens, phase, 0)
    expected.backward()
    assert loss.equal(expected.detach())
    assert all(got[n].equal(v.grad) for n, v in model.tensors().items() if v.requires_grad)
