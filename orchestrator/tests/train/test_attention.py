"""Window and selected rows under one softmax, against a dense float64 reference; what is out of sight has no effect."""

from __future__ import annotations

import pytest
import torch

from orchestrator.train import attention
from orchestrator.train.attention import sparse_attention, window_mask

B, S, H, D, W = 2, 96, 3, 8, 16
SCALE = 0.3


def inputs(ratio: int, *, selected: bool, bounded: bool, seed: int = 0) -> dict:
    """Arguments by name; floats are float64 with gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    positions = torch.arange(S)
    chosen = lower = None
    if ratio and selected:
        chosen = torch.rand(B, S, S // ratio, generator=generator) < 0.4
    if bounded:
        starts = torch.rand(B, S, generator=generator) < 0.03
        starts[:, 37] = True
        lower = torch.where(starts, positions, 0).cummax(-1).values
    return {
        "q": draw(B, S, H, D),
        "rows": draw(B, S, D),
        "main": draw(B, S // ratio, D) if ratio else None,
        "sink": draw(H),
        "visible": ((positions + 1) // ratio if ratio else torch.zeros_like(positions)).int(),
        "chosen": chosen,
        "lower": lower,
    }


def run(q, rows, main, sink, visible, chosen, lower):
    seen = window_mask(B, S, W, lower, q.device)
    return sparse_attention(q, rows, main, sink, seen, visible, chosen, W, SCALE)


def sight(visible, chosen, lower, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which window rows [B, S, S] and which compressed rows [B, S, G] each query reads; plain loops."""
    near = torch.zeros(B, S, S, dtype=torch.bool)
    far = torch.zeros(B, S, groups, dtype=torch.bool)
    for b in range(B):
        for s in range(S):
            first = max(0, s - W + 1, 0 if lower is None else int(lower[b, s]))
            near[b, s, first : s + 1] = True
            far[b, s, : int(visible[s])] = True
    return near, far if chosen is None else far & chosen


def reference(q, rows, main, sink, visible, chosen, lower):
    near, far = sight(visible, chosen, lower, 0 if main is None else main.shape[1])
    keys = rows if main is None else torch.cat((rows, main), 1)
    scores = torch.einsum("bshd,bkd->bshk", q, keys) * SCALE
    scores = scores.masked_fill(~torch.cat((near, far), -1)[:, :, None], -torch.inf)
    p = torch.cat((scores, sink[:, None].expand(B, S, H, 1)), -1).softmax(-1)[..., :-1]
    return torch.einsum("bshk,bkd->bshd", p, keys), p[..., S:].sum(2)


@pytest.fixture(params=[32, 512], ids=["slices", "one slice"], autouse=True)
def slices(request, monkeypatch):
    monkeypatch.setattr(attention, "SLICE", request.param)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("ratio", "selected"), [(0, False), (1, False), (1, True), (2, False), (2, True)])
def test_outputs_and_gradients_are_those_of_dense_attention(ratio, selected, bounded):
    given = inputs(ratio, selected=selected, bounded=bounded)
    out, mass = run(**given)
    expected, _ = reference(**given)
    assert (out - expected).abs().max() < 3e-6
    leaves = {name: given[name] for name in ("q", "rows", "main", "sink") if given[name] is not None}
    upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(8))
    got = torch.autograd.grad(out, list(leaves.values()), upstream)
    wanted = torch.autograd.grad(expected, list(leaves.values()), upstream)
    for name, a, b in zip(leaves, got, wanted, strict=True):
        assert (a - b).abs().max() < 1e-5 < b.abs().max(), name
    assert mass.shape == (B, S, S // ratio if ratio else 0)


@pytest.mark.parametrize("ratio", [1, 2])
def test_mass_is_what_unmasked_heads_would_give(ratio):
    given = inputs(ratio, selected=True, bounded=True)
    _, mass = run(**given)
    _, all_rows = reference(**{**given, "chosen": None})
    assert (mass - all_rows).abs().max() < 1e-6
    assert not mass.requires_grad
    assert mass.equal(run(**{**given, "chosen": None})[1])
    assert (mass.sum(-1) < H).all() and mass[:, -1].sum(-1).min() > 0.1
    assert not mass[:, torch.arange(S)[:, None] < torch.arange(S // ratio) * ratio + ratio - 1].any()


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_rows_out_of_sight_have_no_effect(ratio):
    """A huge value in a row that one query must not read changes no bit of it, and the row gets no gradient."""
    given = inputs(ratio, selected=True, bounded=True)
    out, _ = run(**given)
    near, far = sight(given["visible"], given["chosen"], given["lower"], 0 if not ratio else S // ratio)
    for s in (0, 1, 36, 37, 40, 95):
        hidden_near, hidden_far = ~near[:, s], ~far[:, s]
        poisoned = dict(given)
        poisoned["rows"] = given["rows"].detach().masked_fill(hidden_near[..., None], 1e30)
        if ratio:
            poisoned["main"] = given["main"].detach().masked_fill(hidden_far[..., None], 1e30)
        assert run(**poisoned)[0][:, s].equal(out[:, s])
        leaves = [given["rows"]] + ([given["main"]] if ratio else [])
        grads = torch.autograd.grad(out[:, s].square().sum(), leaves, retain_graph=True)
        assert not grads[0][hidden_near].any() and grads[0][near[:, s]].any()
        if ratio:
            assert not grads[1][hidden_far].any()
            assert grads[1][far[:, s]].any() or not far[:, s].any()


def test_a_query_without_rows_but_its_own_leans_on_the_sink():
    given = inputs(1, selected=False, bounded=False)
    given["chosen"] = torch.zeros(B, S, S, dtype=torch.bool)
    out, _ = run(**given)
    own = (torch.einsum("bhd,bd->bh", given["q"][:, 0], given["rows"][:, 0]) * SCALE - given["sink"]).sigmoid()
    assert torch.allclose(out[:, 0], own[..., None] * given["rows"][:, 0, None], atol=1e-6)


@pytest.mark.parametrize("bounded", [False, True])
def test_window_mask_by_hand(bounded):
    lower = inputs(0, selected=False, bounded=bounded)["lower"]
    mask = window_mask(B, S, W, lower, torch.device("cpu"))
    near, _ = sight(torch.zeros(S), None, lower, 0)
    assert mask.shape == (B, S, 2 * W)
    for b in range(B):
        for s in range(S):
            before = (s // W - 1) * W
            keys = {before + i for i in mask[b, s].nonzero()[:, 0].tolist()}
            assert keys == set(near[b, s].nonzero()[:, 0].tolist())
