"""The router: scores over the whole range, ties, biases, special values."""

from __future__ import annotations

import math

import pytest
import torch

import kernel_core
import mega_moe
from kernel_core.testing import assert_bitwise, assert_close, assert_row_invariant, assert_thread_invariant, each_isa
from mega_moe import reference


def exact_score(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + e^x)) in float64."""
    x = logits.double()
    return torch.where(x < -30, torch.exp(x / 2), torch.log1p(torch.exp(-x.abs())).add(x.clamp_min(0)).sqrt())


@each_isa()
def test_scores_over_the_whole_range(isa):
    x = torch.cat((torch.linspace(-170, 170, 4001), torch.linspace(-2, 2, 4000), torch.tensor([1e4, 1e30, 0.0, -0.0])))
    logits = torch.stack((x, x + 0.25), dim=1)
    with kernel_core.limit_isa(isa):
        ids, weights = mega_moe.route(logits, torch.zeros(2), 2, routed_scale=1.0)
    score = exact_score(logits).gather(1, ids.long())
    expected = score / (score.sum(1, keepdim=True) + 1e-20)
    assert_close(weights, expected, atol=0, rtol=4e-6, name="weights")


@each_isa()
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (12, 2), (128, 3), (384, 6), (17, 17)])
def test_matches_the_reference(weights, isa, experts, top_k):
    logits, bias, bias_vl = weights.normal(40, experts) * 4, weights.normal(experts), weights.normal(experts)
    is_image = torch.arange(40) % 3 == 0
    arguments = dict(bias_vl=bias_vl, is_image=is_image)
    with kernel_core.limit_isa(isa):
        ids, gate = mega_moe.route(logits, bias, top_k, **arguments)
        assert_row_invariant(lambda x, i: mega_moe.route(x, bias, top_k, bias_vl=bias_vl, is_image=i), logits, is_image)
    score = exact_score(logits)
    biased = score + torch.where(is_image[:, None], bias_vl, bias).double()
    order = biased.gather(1, ids.long())
    assert (order.diff(dim=1) < 1e-6).all()  # descending
    assert (order[:, -1] > biased.scatter(1, ids.long(), -math.inf).amax(1) - 1e-6).all()  # nothing better left out
    picked = score.gather(1, ids.long())
    assert_close(gate, picked / picked.sum(1, keepdim=True) * 1.5, atol=1e-7, rtol=3e-6)
    expected_ids, expected = reference.route(logits, bias, top_k, **arguments)
    same = (ids == expected_ids).all(1)
    assert same.float().mean() > 0.9
    assert_close(gate[same], expected[same], atol=1e-7, rtol=3e-6)


@each_isa()
def test_ties_go_to_the_lower_id(isa):
    logits = torch.zeros(3, 40)
    logits[1, 30:] = 1.0
    logits[2, [5, 35]] = 2.0
    with kernel_core.limit_isa(isa):
        ids, gate = mega_moe.route(logits, torch.zeros(40), 4)
    assert ids.tolist() == [[0, 1, 2, 3], [30, 31, 32, 33], [5, 35, 0, 1]]
    assert torch.equal(gate[0], torch.full((4,), 0.375))


@each_isa()
def test_bias_selects_but_does_not_weigh(isa):
    logits = torch.tensor([[0.0, 0.0, 3.0, 0.0]]).repeat(2, 1)
    bias, bias_vl = torch.tensor([0.0, 100.0, 0.0, 50.0]), torch.tensor([9.0, 0.0, -9.0, 8.0])
    is_image = torch.tensor([False, True])
    with kernel_core.limit_isa(isa):
        ids, gate = mega_moe.route(logits, bias, 2, bias_vl=bias_vl, is_image=is_image)
    assert ids.tolist() == [[1, 3], [0, 3]]
    assert torch.equal(gate, torch.full((2, 2), 0.75))


@each_isa()
def test_special_values(isa):
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, 1.0, nan, 2.0], [nan] * 4, [-inf, -inf, -inf, -300.0], [nan, nan, nan, 1.0]])
    with kernel_core.limit_isa(isa):
        ids, gate = mega_moe.route(logits, torch.zeros(4), 2)
    assert ids.tolist() == [[3, 1], [0, 1], [0, 1], [3, 0]]
    assert gate[0].isfinite().all() and gate[1].isnan().all() and gate[3].isnan().all()
    assert torch.equal(gate[2], torch.zeros(2))  # all scores 0: the floor of the divisor avoids 0 / 0


@each_isa()
def test_very_negative_logits_keep_their_weights(isa):
    with kernel_core.limit_isa(isa):
        _, gate = mega_moe.route(torch.tensor([[-80.0, -81.0, -90.0]]), torch.zeros(3), 2)
    assert_close(gate.sum(1), torch.tensor([1.5]), atol=0, rtol=1e-2)


def test_one_expert_gets_the_whole_scale():
    ids, gate = mega_moe.route(torch.tensor([[0.3, 0.7]]), torch.zeros(2), 1)
    assert ids.tolist() == [[1]] and abs(gate.item() - 1.5) < 1e-6


def test_empty_threads_and_registered_op(weights):
    ids, gate = mega_moe.route(torch.empty(0, 8), torch.zeros(8), 2)
    assert ids.shape == gate.shape == (0, 2) and ids.dtype == torch.int32
    logits, bias = weights.normal(500, 384), weights.normal(384)
    assert_thread_invariant(lambda: mega_moe.route(logits, bias, 6))
    for got, expected in zip(torch.ops.mega_moe.route(logits, bias, 6), mega_moe.route(logits, bias, 6), strict=True):
        assert_bitwise(got, expected)


def test_bad_arguments():
    logits, bias = torch.zeros(2, 4), torch.zeros(4)
    cases = [
        ("logits", (logits.double(), bias, 2), {}),
        ("logits", (torch.zeros(4), bias, 2), {}),
        ("bias", (logits, torch.zeros(5), 2), {}),
        ("top_k", (logits, bias, 0), {}),
        ("top_k", (logits, bias, 5), {}),
        ("bias_vl", (logits, bias, 2), dict(bias_vl=torch.zeros(3), is_image=torch.zeros(2, dtype=torch.bool))),
        ("is_image", (logits, bias, 2), dict(bias_vl=bias, is_image=torch.zeros(2))),
        ("bias_vl, is_image", (logits, bias, 2), dict(bias_vl=bias)),
    ]
    for argument, positional, named in cases:
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed is"):
            mega_moe.route(*positional, **named)
