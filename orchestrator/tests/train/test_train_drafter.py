"""The draft stages in training are the engine's drafter; what they learn from, and what they leave alone."""

from __future__ import annotations

import pytest
import torch

from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.drafter import Drafter
from orchestrator.model.taps import Taps
from orchestrator.train import drafter as module
from orchestrator.train.drafter import TrainDrafter
from orchestrator.train.noise import noise
from orchestrator.train.optimizer import Optimizer
from orchestrator.train.phases import Phase

LENGTH = 160
EXACT = Phase(1.0, LENGTH, 2, quantised=False)
STORED = Phase(1.0, LENGTH, 2, replay=True)


def tokens_for(config, rows: int, length: int, seed: int = 4) -> torch.Tensor:
    return torch.randint(3, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def drafter(new_backbone, imported):
    """With the weights of `nano_folder`."""
    made = TrainDrafter(new_backbone())
    with torch.no_grad():
        for name, value in made.tensors().items():
            value.copy_(imported[name])
    return made


def engine_drafts(engine, row, anchors, size):
    """Draft logits [A, size, V] and confidence logits [A, size] at each anchor, with the true tokens forced."""
    stages, config = Drafter(engine), engine.config
    blocks = list(range(1, 1 + -(-len(row) // 128)))
    cache = CachePools(config, len(blocks) + 1, 2, quantised=False, draft_stages=config.num_nextn_predict_layers)
    logits, confidence, done = [], [], 0
    for anchor in anchors:
        history = row[max(0, done - 3) : done].tolist()
        chunk = Chunk(row[done:anchor].tolist(), done, 1, blocks, history=history, logits="none")
        taps = Taps(config)
        engine.forward(StepBatch.build([chunk], engine.ratios), cache, None, taps)
        stages.context(taps, cache)
        done = anchor
        seen: list[torch.Tensor] = []

        def force(k, raw, at=anchor, seen=seen):
            seen.append(raw[0])
            return row[at + 1 + k].view(1)

        one = stages.block(row[anchor].view(1), torch.tensor([anchor]), torch.tensor([1], dtype=torch.int32), cache)
        drafts = stages.choose(one, force)
        logits.append(torch.stack(seen))
        confidence.append(drafts.confidence_logits[0])
    assert logits[0].shape[0] == size
    return torch.stack(logits), torch.stack(confidence)


def test_logits_and_confidence_are_those_of_the_engine(engine, drafter):
    size = engine.config.dspark_block_size
    tokens = tokens_for(engine.config, 2, LENGTH)
    anchors = torch.tensor([[1, 2, 31, 32, 100], [5, 33, 64, 120, LENGTH - size - 1]])
    with torch.no_grad():
        out = drafter.backbone(tokens, EXACT, taps=True)
        flat = anchors[..., None] + torch.arange(size)
        before = torch.stack([row[at] for row, at in zip(tokens, flat, strict=True)]).flatten(0, 1)
        logits, confidence = drafter(out.taps, anchors, before[:, 0], before, EXACT)
    for i, row in enumerate(tokens):
        theirs, theirs_confidence = engine_drafts(engine, row, anchors[i].tolist(), size)
        ours = logits.unflatten(0, (2, -1))[i]
        assert ours.std() > 0.3 and (ours - theirs).abs().max() < 1e-3
        assert (confidence.unflatten(0, (2, -1))[i] - theirs_confidence).abs().max() < 1e-3
    assert confidence.std() > 0.1


def reached(tensors) -> set[str]:
    return {name for name, value in tensors.items() if value.grad is not None and value.grad.any()}


def test_gradients_reach_every_tensor_of_the_stages_and_nothing_else(drafter):
    tokens = tokens_for(drafter.config, 2, LENGTH + 1)
    loss, metrics = drafter.loss(tokens, STORED, 0)
    loss.backward()
    tensors = drafter.tensors()
    assert all(name.startswith("mtp.") for name in tensors)
    assert set(tensors) - reached(tensors) == {n for n in tensors if n.endswith(("gate.bias", "gate.bias_vl"))}
    assert all(v.grad.isfinite().all() for v in tensors.values() if v.grad is not None)
    backbone = drafter.backbone.tensors()
    assert not any(v.requires_grad for v in backbone.values())
    assert not reached(backbone) and not drafter.backbone.load.any()
    assert not set(drafter.state_dict()) & {n.replace(".", "/") for n in backbone}
    assert set(metrics) == {"ce", "l1", "bce", "length", *(f"accept{k}" for k in range(5))}


def test_from_the_start_all_but_what_the_zero_head_hides(fresh_backbone):
    """The Markov head starts at zero; only its embedding waits for it."""
    made = TrainDrafter(fresh_backbone)
    made.loss(tokens_for(made.config, 1, LENGTH + 1), STORED, 0)[0].backward()
    tensors = made.tensors()
    missing = {n for n in set(tensors) - reached(tensors) if not n.endswith(("gate.bias", "gate.bias_vl"))}
    assert missing == {"mtp.2.markov_head.embed.weight"}


@pytest.mark.parametrize("length", [32, 64, 160, 1500])
def test_anchors_are_in_range(drafter, length):
    tokens = tokens_for(drafter.config, 3, length)
    anchors = drafter._anchors(tokens)
    assert anchors.shape == (3, min(module.ANCHORS, length // 4))
    assert anchors.min() >= 1, "a token before each"
    assert anchors.max() + drafter.config.dspark_block_size <= length - 1, "a whole block after each"
    assert (anchors.diff(dim=-1) > 0).all()
    assert anchors.equal(drafter._anchors(tokens)) and not anchors[0].equal(anchors[1])


def test_the_last_anchors_are_drawn_too(drafter):
    """The best of the noise are taken, up to the last place with room for a block."""
    found = set()
    for seed in range(40):
        tokens = tokens_for(drafter.config, 1, 32, seed)
        anchors = drafter._anchors(tokens)[0].tolist()
        values = noise(tokens, salt=3)[0, : 32 - drafter.config.dspark_block_size - 1]
        assert {a - 1 for a in anchors} == set(values.topk(8).indices.tolist())
        found |= set(anchors)
    assert found == set(range(1, 32 - drafter.config.dspark_block_size))


def test_the_loss_is_that_of_its_formula(drafter):
    """Of one anchor, by hand from the logits of both models."""
    config, size = drafter.config, drafter.config.dspark_block_size
    tokens = tokens_for(config, 1, LENGTH + 1)
    drafter._anchors = lambda given: torch.tensor([[50]])
    loss, metrics = drafter.loss(tokens, EXACT, 0)
    with torch.no_grad():
        out = drafter.backbone(tokens[:, :-1], EXACT, taps=True)
        text = tokens[0, 50 : 51 + size]
        logits, confidence = drafter(out.taps, torch.tensor([[50]]), text[:1], text[None, :-1], EXACT)
        target = out.hidden[0, 50 : 50 + size] @ drafter.backbone.get("head.weight").T
        draft = logits[0].softmax(-1)
        distance = (draft - target.softmax(-1)).abs().sum(-1)
        accepted = torch.minimum(draft, target.softmax(-1)).sum(-1)  # what rejection sampling accepts
        assert torch.allclose(accepted, 1 - distance / 2, atol=1e-6)
        ce = -draft[torch.arange(size), text[1:]].log()
        c = confidence[0].sigmoid()
        bce = -(accepted * c.log() + (1 - accepted) * (1 - c).log())
        weight = torch.exp(-torch.arange(size) / 4)
        expected = ((0.1 * ce + 0.9 * distance + bce) * weight).sum() / weight.sum()
    assert torch.allclose(loss, expected, rtol=1e-4)
    assert torch.allclose(metrics["accept1"], accepted[1], atol=1e-5)
    length = 1 + torch.stack([accepted[: k + 1].prod() for k in range(size)]).sum()
    assert torch.allclose(metrics["length"], length, atol=1e-4)


def test_confidence_does_not_teach_the_drafts():
    """It foresees acceptance; making drafts easier to foresee is no aim."""
    generator = torch.Generator().manual_seed(0)
    logits, target = (torch.randn(6, 5, 32, generator=generator) for _ in range(2))
    logits, confidence = logits.requires_grad_(), torch.randn(6, 5, generator=generator).requires_grad_()
    labels = torch.randint(0, 32, (6, 5), generator=generator)
    ce, distance, bce, accepted = module._losses(logits, target, labels, confidence)
    to_drafts, to_confidence = torch.autograd.grad(bce.sum(), (logits, confidence), allow_unused=True)
    assert to_drafts is None and not accepted.requires_grad
    assert torch.allclose(to_confidence, confidence.sigmoid() - accepted, atol=1e-6)
    for value in (ce, distance):
        assert torch.autograd.grad(value.sum(), logits, retain_graph=True)[0].any()


def test_drafts_learn(fresh_backbone):
    made = TrainDrafter(fresh_backbone)
    tokens = tokens_for(made.config, 1, 65)
    phase = Phase(1.0, 64, 1)
    optimizer = Optimizer(made, lr=1e-2)
    losses = []
    for step in range(8):
        loss, _ = made.loss(tokens, phase, step)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        made.after_step(step / 8)
    assert losses[-1] < 0.8 * losses[0] and optimizer.skipped == 0


def test_router_biases_of_the_stages_move_against_the_load(drafter):
    before = [drafter._get(f"mtp.{i}.ffn.gate.bias").clone() for i in range(3)]
    drafter.loss(tokens_for(drafter.config, 1, 65), Phase(1.0, 64, 1), 0)
    load = drafter.load.clone()
    inputs = 16 * drafter.config.dspark_block_size  # 64 / 4 anchors
    assert (load.sum(-1) == inputs * drafter.config.dspark_num_experts_per_tok).all()
    drafter.after_step(1.0)
    for i, counts in enumerate(load):
        moved = drafter._get(f"mtp.{i}.ffn.gate.bias") - before[i]
        assert torch.allclose(moved, torch.sign(counts.mean() - counts) * 1e-4, atol=1e-7)
    assert not drafter.load.any()
