"""Index scores, selection and candidates by hand; the indexer's loss against a plain KL in float64."""

from __future__ import annotations

import math

import pytest
import torch

from orchestrator.train import indexer
from orchestrator.train.indexer import candidate_rows, index_loss, index_scores, select, visible_rows

B, S, H, D = 2, 64, 3, 8


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("slice_", [16, 512])
@pytest.mark.parametrize("ratio", [1, 2])
def test_scores_and_gradients(ratio, slice_, monkeypatch):
    monkeypatch.setattr(indexer, "SLICE", slice_)
    groups = S // ratio
    q, keys, weights = (
        draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(((B, S, H, D), (B, groups, D), (B, S, H)))
    )
    scores = index_scores(q, keys, weights)
    expected = (torch.einsum("bshd,bgd->bshg", q, keys).relu() * weights[..., None]).sum(2)
    visible = visible_rows((torch.arange(S) + 1) // ratio, groups)
    assert scores.dtype == torch.float32
    assert ((scores - expected) * visible).abs().max() < 1e-5
    if slice_ < S:
        assert not scores[:, :slice_, slice_ // ratio :].any()
    upstream = draw(B, S, groups, seed=9) * visible
    got = torch.autograd.grad(scores, (q, keys, weights), upstream.float())
    wanted = torch.autograd.grad(expected, (q, keys, weights), upstream)
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() < 3e-5 < b.abs().max()


def plain_select(scores, allowed, k):
    """The best `k` of one row of lists; of equals the lower row."""
    order = sorted((g for g, ok in enumerate(allowed) if ok), key=lambda g: (-scores[g], g))
    return [g in order[:k] for g in range(len(scores))]


@pytest.mark.parametrize("k", [1, 5, 31, 32, 40])
def test_select_takes_the_best_and_of_equals_the_lower(k):
    scores = draw(B, S, 32, dtype=torch.float32).round()  # many ties
    scores[0, 10:20] = 0.0
    allowed = visible_rows((torch.arange(S) + 1) // 2, 32) & (draw(B, S, 32, seed=1) > -0.5)
    chosen = select(scores, allowed, k)
    expected = [
        [plain_select(*row, k) for row in zip(a, b, strict=True)]
        for a, b in zip(scores.tolist(), allowed.tolist(), strict=True)
    ]
    assert chosen.equal(torch.tensor(expected))
    assert chosen.sum(-1).equal(allowed.sum(-1).clamp(max=k))


def test_select_shares_a_mask_between_sequences():
    scores, allowed = draw(B, S, 32, dtype=torch.float32), visible_rows((torch.arange(S) + 1) // 2, 32)
    assert select(scores, allowed, 4).equal(select(scores, allowed.expand(B, -1, -1), 4))
    assert select(scores, allowed, 32).equal(allowed.expand(B, -1, -1))


@pytest.mark.parametrize(("block", "keep"), [(4, 3), (4, 1), (8, 4), (4, 100)])
def test_candidates_by_hand(block, keep):
    groups = 48
    scores = draw(B, S, groups, dtype=torch.float32)
    visible = torch.arange(S).clamp(max=groups)
    got = candidate_rows(scores, visible, block, keep)
    for b in range(B):
        for s in range(S):
            count = int(visible[s])
            blocks = {g // block for g in range(count)}
            newest = (count - 1) // block
            best = {i: max(scores[b, s, i * block : min(count, (i + 1) * block)].tolist()) for i in blocks}
            others = sorted(blocks - {newest}, key=lambda i: -best[i])
            kept = set(others[: keep - 1]) | {newest}
            expected = [g < count and g // block in kept for g in range(groups)]
            assert got[b, s].tolist() == expected, (b, s)
    assert got[0, 1:].any(-1).all() and not got[:, 0].any()


def test_candidates_ignore_rows_that_are_not_visible():
    scores = draw(B, S, 48, dtype=torch.float32)
    visible = (torch.arange(S) + 1) // 2
    hidden = ~visible_rows(visible, 48)
    assert candidate_rows(scores, visible, 4, 3).equal(candidate_rows(scores.masked_fill(hidden, 1e9), visible, 4, 3))


def plain_loss(scores, allowed, mass):
    """KL in float64, row by row."""
    scores, mass = scores.double(), mass.double()
    total = scores.sum() * 0.0
    for b in range(B):
        for s in range(S):
            rows = allowed[b % len(allowed), s].nonzero()[:, 0]
            target = mass[b, s, rows]
            if len(rows) < 2 or target.sum() == 0:
                continue
            target = target / target.sum()
            log_q = scores[b, s, rows].log_softmax(0)
            total = total + torch.xlogy(target, target).sum() - (target * log_q).sum()
    return total / (B * S)


@pytest.mark.parametrize("shared", [True, False], ids=["one mask", "a mask a sequence"])
def test_loss_and_gradient_are_those_of_a_plain_divergence(shared):
    groups = 24
    scores = (3 * draw(B, S, groups, dtype=torch.float32)).requires_grad_()
    mass = draw(B, S, groups, seed=1, dtype=torch.float32).exp()
    mass[:, :, ::5] = 0.0
    mass[0, 40] = 0.0
    allowed = visible_rows((torch.arange(S) - 4).clamp(0, groups), groups)
    if not shared:
        allowed = allowed & (draw(B, S, groups, seed=2) > -0.7)
    loss, expected = index_loss(scores, allowed, mass), plain_loss(scores, allowed, mass)
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-5) and expected > 0.1
    (got,), (wanted,) = torch.autograd.grad(loss, scores), torch.autograd.grad(expected, scores)
    assert (got - wanted).abs().max() < 1e-7 < wanted.abs().max()
    assert not got.masked_select(~allowed.expand_as(got)).any()
    few = allowed.expand_as(got).sum(-1) < 2
    assert few.any() and not got[few].any() and not got[0, 40].any()


def test_no_row_in_sight_is_no_loss():
    scores = draw(B, S, 24, dtype=torch.float32).requires_grad_()
    loss = index_loss(scores, torch.zeros(1, S, 24, dtype=torch.bool), torch.ones(B, S, 24))
    assert loss == 0 and not torch.autograd.grad(loss, scores)[0].any()


def test_scores_of_the_target_have_no_loss():
    mass = draw(B, S, 24, dtype=torch.float32).exp()
    allowed = visible_rows(torch.arange(S).clamp(max=24), 24)
    assert abs(index_loss(mass.log() + 2.5, allowed, mass)) < 1e-6
