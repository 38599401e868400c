"""The rule of speculative sampling: what comes out is distributed as the target's own sampling."""

from __future__ import annotations

import itertools

import pytest
import torch

from orchestrator.evaluate.verify import acceptance, residual, verify

V, LENGTH = 3, 2


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """p over the tokens after every prefix, and q likewise, as functions of the prefix: [V + 1, V + 1, V]."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(V + 1, V + 1, V, generator=generator, dtype=torch.float64) ** 2 for _ in range(2))
    p[0, 0, 1] = q[1, 0, 0] = 0.0  # impossible tokens on either side
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", range(4))
def test_every_text_has_the_probability_of_the_target(seed):
    """Exact, by enumeration of drafts, acceptances and replacements of two drafts and the token behind them."""
    p, q = tables(seed)
    # Row of a table for a prefix: no token is 0, token t is t + 1.
    out = torch.zeros(V, V, V, dtype=torch.float64)
    for y1, y2 in itertools.product(range(V), repeat=2):
        q1, q2 = q[0, 0], q[y1 + 1, 0]
        chance = q1[y1] * q2[y2]
        if chance == 0:
            continue
        log_p = torch.stack([p[0, 0], p[y1 + 1, 0], p[y1 + 1, y2 + 1]]).log()
        log_q = torch.stack([q1, q2]).log()
        a = acceptance(log_p[:2], log_q, torch.tensor([y1, y2]))
        left = residual(log_p[:2], log_q)
        # Tokens that a step leaves open are drawn from the target in later steps.
        for first in range(V):
            out[first] += chance * (1 - a[0]) * left[0, first] * (p[first + 1, 0].unsqueeze(1) * p[first + 1, 1:])
        for second in range(V):
            out[y1, second] += chance * a[0] * (1 - a[1]) * left[1, second] * p[y1 + 1, second + 1]
        out[y1, y2] += chance * a[0] * a[1] * p[y1 + 1, y2 + 1]
    expected = p[0, 0].view(V, 1, 1) * p[1:, 0].unsqueeze(-1) * p[1:, 1:]
    assert (out - expected).abs().max() < 1e-12


def test_verify_draws_by_that_rule():
    p, q = tables(7)
    count = 60_000
    log_p = torch.stack([p[0, 0], p[1, 0], p[1, 1]]).log().expand(count, 3, V)
    log_q = torch.stack([q[0, 0], q[1, 0]]).log().expand(count, 2, V)
    drafts = torch.tensor([0, 2]).expand(count, 2).contiguous()
    kept, token = verify(log_p, log_q, drafts, torch.arange(count), torch.full((count,), 9))
    a = acceptance(log_p[0, :2], log_q[0], drafts[0])
    chances = [1 - a[0], a[0] * (1 - a[1]), a[0] * a[1]]
    for places, chance in enumerate(chances):
        assert (kept == places).double().mean() == pytest.approx(float(chance), abs=0.01)
    behind = [*residual(log_p[0, :2], log_q[0]), p[1, 1]]
    for places in range(3):
        seen = torch.bincount(token[kept == places], minlength=V) / max(1, int((kept == places).sum()))
        assert (seen - behind[places]).abs().max() < 0.03, places


def test_points_give_greedy_matching():
    """At temperature 0 both sides are points: a draft stands where it is the target's best, and that replaces it."""

    def point(token: int) -> torch.Tensor:
        row = torch.full((V,), -torch.inf)
        row[token] = 0.0
        return row

    log_p = torch.stack([point(1), point(2), point(0)]).expand(3, 3, V)
    drafts = torch.tensor([[1, 2], [1, 0], [0, 2]])
    log_q = torch.stack([torch.stack([point(t) for t in row]) for row in drafts.tolist()])
    kept, token = verify(log_p, log_q, drafts, torch.arange(3), torch.full((3,), 5))
    assert kept.tolist() == [2, 1, 0] and token.tolist() == [0, 2, 1]


def test_equal_distributions_keep_every_draft():
    p, _ = tables(3)
    log_p = p[0, 0].log().expand(50, 2, V)
    kept, token = verify(log_p, log_p[:, :1], torch.zeros(50, 1, dtype=torch.int64), torch.arange(50), torch.arange(50))
    assert kept.tolist() == [1] * 50 and (token != 1).all(), "token 1 has no probability"
