"""Verified tokens have the target's distribution: exactly by enumeration, and in long runs; a wrong schedule shows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import dspark_kernels
from dspark_kernels import reference, schedule
from dspark_kernels.reference_verify import probabilities
from kernel_core.testing.child import load_file

CASES = load_file(Path(__file__).with_name("spec_cases.py"))
draft, settings, step, target_rows = CASES.draft, CASES.settings, CASES.step, CASES.target_rows

CHANCE = 5.0  # standard deviations; all seeds are fixed


def deviation(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Chi-square statistic, standardised; cells with less than five expected are left out."""
    expected = probs.double() * counts.sum()
    kept = expected > 5
    statistic = ((counts - expected).square() / expected)[kept].sum().item()
    freedom = int(kept.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def chain(V: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * spread


def rows_of(table: torch.Tensor, temperature=1.0, top_p=1.0, top_k=0) -> torch.Tensor:
    """Probabilities float64 [V, V] after temperature and filters."""
    s = settings(len(table), temperature, top_p, top_k)
    return reference.distribution(table, s.temperature, s.top_p, s.top_k)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.3, 0.8, 0), (1.0, 1.0, 2), (0.9, 0.9, 3)]
)
def test_exact_by_enumeration(temperature, top_p, top_k):
    """For each draft the accepted u are [0, min(1, p / q)), and the redraw splits (0, 1) as the residual says.

    So the output's probability of v is q(v) min(1, p(v) / q(v)) + the sum over drafts of rejection x residual(v),
    which the last lines add up from the parts as they were seen: p(v).
    """
    V, R = 5, 4000
    p_logits, q_logits = torch.randn(1, V), torch.randn(1, V)
    s = settings(R, temperature, top_p, top_k)
    positions = torch.full((R,), 40)
    one = settings(1, temperature, top_p, top_k)
    p = reference.distribution(p_logits, *one[:3])[0]
    drafts, record = draft(q_logits.expand(V, V), torch.zeros(R, dtype=torch.int64), positions, 1, s)
    q = probabilities(drafts[:1, 0], *(column[:1, 0] for column in record[2:]))[0]
    u_test = dspark_kernels.uniform(s.seeds, positions + 1, 2)
    u_redraw = dspark_kernels.uniform(s.seeds, positions + 1, 3)
    logits, cu, place, owner = target_rows(p_logits.expand(V, V), torch.zeros(R, dtype=torch.int64),
                                           record.tokens, torch.ones(R, dtype=torch.int64))  # fmt: skip
    output = torch.zeros(V, dtype=torch.float64)
    residual = (p - q).clamp(min=0)
    if residual.sum() > 0:
        residual = residual / residual.sum()
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), residual.cumsum(0)])
    for y in range(V):
        if q[y] == 0:
            continue
        forced = record._replace(tokens=torch.full_like(record.tokens, y),
                                 logprobs=torch.full_like(record.logprobs, q[y].log().item()))  # fmt: skip
        got = dspark_kernels.verify(logits, drafts, forced, cu, positions[owner] + place, *s)
        chance = min(1.0, float(p[y] / q[y]))
        accepted = got.accepted == 1
        clear = (u_test - chance).abs() > 1e-6
        assert bool((accepted == (u_test < chance))[clear].all())
        assert bool((got.tokens[accepted, 0] == y).all())
        redrawn = got.tokens[~accepted, 0]
        for v in redrawn.unique().tolist():
            mine = u_redraw[~accepted][redrawn == v]
            assert edges[v] - 1e-6 <= mine.min() and mine.max() <= edges[v + 1] + 1e-6
        output[y] += q[y] * chance
        output += q[y] * (1 - chance) * residual
    assert torch.allclose(output, p, atol=1e-6)


def three_tokens(target, drafter, R, G, s, length_of):
    """Three tokens of each of R chains, in as many steps as it takes."""
    made, have = torch.full((R, 3 + G), -1), torch.zeros(R, dtype=torch.int64)
    anchors, at = torch.zeros(R, dtype=torch.int64), torch.zeros(R, dtype=torch.int64)
    for number in range(3):
        out = step(target, drafter, anchors, at, length_of(number, R), G, s)
        for j in range(1 + G):
            there = (j < out.counts) & (have < 3)
            made[there, have[there]] = out.tokens[there, j]
            have[there] += 1
        anchors, at = out.last, at + out.counts
    assert bool((have >= 3).all())
    return made[:, :3]


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_three_tokens_of_a_chain(G, temperature, top_p):
    """The joint distribution of a text over several steps, whatever the lengths of each step."""
    V, R = 4, 30_000
    target, drafter = chain(V, 1), chain(V, 2)
    p = rows_of(target, temperature, top_p)
    joint = (p[0].view(V, 1, 1) * p.view(V, V, 1) * p.view(1, V, V)).flatten()

    def lengths(number, count):
        return (torch.arange(count) + number) % (G + 1)

    text = three_tokens(target, drafter, R, G, settings(R, temperature, top_p), lengths)
    counts = torch.bincount(text[:, 0] * V * V + text[:, 1] * V + text[:, 2], minlength=V**3)
    assert bool((counts[joint == 0] == 0).all())
    assert abs(deviation(counts, joint)) < CHANCE


def test_masks_at_every_draft_position():
    """Forbidden tokens never come, allowed ones as often as they should, though the drafter knows no mask."""
    V, R, G = 5, 30_000, 2
    target, drafter = chain(V, 3), chain(V, 4)
    s, anchors, positions = settings(R), torch.zeros(R, dtype=torch.int64), torch.zeros(R, dtype=torch.int64)
    drafts, record = draft(drafter, anchors, positions, G, s)
    logits, cu, place, owner = target_rows(target, anchors, record.tokens, torch.full((R,), G))
    allowed = torch.tensor([0b10110, 0b01101, 0b11001], dtype=torch.int32)  # by place
    masks = allowed[place].unsqueeze(1).contiguous()
    dspark_kernels.apply_token_mask(logits, masks, torch.arange(len(logits)))
    out = dspark_kernels.verify(logits, drafts, record, cu, positions[owner] + place, *s)
    bits = (allowed.unsqueeze(1) >> torch.arange(V)) & 1 == 1
    first = torch.where(bits[0], target[0], -torch.inf).softmax(0)
    assert abs(deviation(torch.bincount(out.tokens[:, 0], minlength=V), first)) < CHANCE
    for before in range(V):
        second = out.tokens[(out.counts >= 2) & (out.tokens[:, 0] == before), 1]
        if len(second) > 500:
            expected = torch.where(bits[1], target[before], -torch.inf).softmax(0)
            counts = torch.bincount(second, minlength=V)
            assert bool((counts[~bits[1]] == 0).all())
            assert abs(deviation(counts, expected)) < CHANCE


P, Q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
COST = (1.0, 0.5, 0.45)  # steps a second with 1, 2 and 3 rows
"""With confidences 0.8 and then 0.9: 1 x 1, 1.8 x 0.5, 2.52 x 0.45 = 1.134. The early stop gives no draft, the whole
search two."""


def confidences(drafts: torch.Tensor) -> torch.Tensor:
    """The second draft's confidence depends on which token the first one is, as it may."""
    second = torch.where(drafts[:, 0] == 0, 0.9, 0.0)
    return torch.stack([torch.full_like(second, 0.8), second], 1)


def lengths_by_search(confidence: torch.Tensor, early_stop: bool) -> int:
    best, length, gain, alive = COST[0], 0, 1.0, 1.0
    for j, c in enumerate(confidence.tolist()):
        alive *= c
        gain += alive
        if gain * COST[j + 1] > best:
            best, length = gain * COST[j + 1], j + 1
        elif early_stop:
            break
    return length


def first_tokens(lengths_for) -> torch.Tensor:
    """Counts of the first token of 40,000 requests, whose drafts' numbers `lengths_for(confidence, drafts)` chooses."""
    R = 40_000
    s, zeros = settings(R), torch.zeros(R, dtype=torch.int64)
    drafts, record = draft(Q.log().expand(2, 2), zeros, zeros, 2, s)
    lengths = lengths_for(confidences(record.tokens), record.tokens)
    logits, cu, place, owner = target_rows(P.log().expand(2, 2), zeros, record.tokens, lengths)
    out = dspark_kernels.verify(logits, drafts, record, cu, zeros[owner] + place, *s)
    return torch.bincount(out.tokens[:, 0], minlength=2)


def test_the_search_of_the_example():
    likely, unlikely = torch.tensor([0.8, 0.9]), torch.tensor([0.8, 0.0])
    assert [lengths_by_search(c, stop) for c in (likely, unlikely) for stop in (True, False)] == [0, 2, 0, 0]


def test_a_schedule_that_looks_at_the_drafted_token_is_found_out():
    """The whole search on the step's own confidences: 0.85 / 0.15 instead of 0.7 / 0.3."""

    def wrong(confidence, drafts):
        by_token = [lengths_by_search(confidences(torch.tensor([[token]]))[0], early_stop=False) for token in (0, 1)]
        return torch.tensor(by_token)[drafts[:, 0]]

    counts = first_tokens(wrong)
    assert deviation(counts, P) > 10 * CHANCE
    assert abs(deviation(counts, torch.tensor([0.85, 0.15]))) < CHANCE


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_our_schedule_keeps_the_distribution(budget):
    """The same confidences, but how many drafts there are is settled before: pairs of requests share a budget."""

    def lengths(confidence, drafts):
        zeros = torch.zeros(2, 3, dtype=torch.int64)
        made = [
            schedule(pair, zeros, zeros[:, 0].contiguous(), LIMITS, budget, 6).lengths for pair in confidence.split(2)
        ]
        return torch.cat(made).long()

    counts = first_tokens(lengths)
    assert abs(deviation(counts, P)) < CHANCE


LIMITS = torch.full((2,), 2, dtype=torch.int32)


def test_the_early_stop_keeps_the_distribution():
    """The one-step form of the published algorithm: lossless because it stops."""

    def lengths(confidence, drafts):
        by_token = [lengths_by_search(confidences(torch.tensor([[token]]))[0], early_stop=True) for token in (0, 1)]
        return torch.tensor(by_token)[drafts[:, 0]]

    assert abs(deviation(first_tokens(lengths), P)) < CHANCE


def test_acceptance_is_the_overlap():
    """The share of accepted drafts is the sum of min(p, q): never 1 by a u of 0."""
    R = 40_000
    s, zeros = settings(R), torch.zeros(R, dtype=torch.int64)
    out = step(P.log().expand(2, 2), Q.log().expand(2, 2), zeros, zeros, torch.ones(R, dtype=torch.int64), 1, s)
    share = torch.bincount(out.accepted, minlength=2)
    assert abs(deviation(share, torch.tensor([0.2, 0.8]))) < CHANCE
