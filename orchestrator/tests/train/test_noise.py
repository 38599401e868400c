"""Pseudo-random numbers from tokens: even, the same for the same, different for everything that differs."""

from __future__ import annotations

import torch

from orchestrator.train.noise import noise


def tokens(rows: int = 8, length: int = 2048, vocabulary: int = 512) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(2))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


def test_numbers_are_even_in_the_unit_interval():
    x = noise(tokens(), salt=1)
    assert x.dtype == torch.float32 and x.shape == (8, 2048)
    assert x.min() >= 0 and x.max() < 1
    counts = torch.histc(x, 16, 0, 1)
    expected = x.numel() / 16
    assert ((counts - expected).square() / expected).sum() < 50  # chi-square with 15 degrees: 1 in 80 000
    assert x.unique().numel() > 0.98 * x.numel()


def test_also_of_tokens_that_repeat():
    x = noise(torch.zeros(2, 2048, dtype=torch.int64), salt=0)
    assert abs(x.mean() - 0.5) < 0.03 and x[0].unique().numel() > 2000
    assert abs(correlation(x[0, 1:], x[0, :-1])) < 0.1


def test_same_tokens_same_numbers():
    given = tokens()
    assert noise(given, salt=1).equal(noise(given.clone(), salt=1))
    assert noise(given, salt=1)[3:5].equal(noise(given[3:5], salt=1))


def test_another_salt_row_token_or_place_gives_others():
    given = tokens()
    x = noise(given, salt=1)
    assert abs(correlation(x, noise(given, salt=2))) < 0.03
    assert abs(correlation(x[0], x[1])) < 0.1
    assert abs(correlation(x[:, 1:], x[:, :-1])) < 0.03
    changed = given.clone()
    changed[0, 7] += 1
    again = noise(changed, salt=1)
    assert again[1:].equal(x[1:])
    assert (again[0] != x[0]).float().mean() > 0.99, "a row's sum is part of all its numbers"


def test_replays_begin_now_and_then(fresh_backbone):
    """Two beginnings a sequence on average; a row's bound is its own position at most and never falls."""
    given = tokens(rows=200, length=256)
    lower = fresh_backbone.replays(given)
    position = torch.arange(256)
    assert (lower <= position).all() and (lower.diff(dim=-1) >= 0).all()
    begins = (lower == position) & (position > 0)
    assert lower.masked_select(begins).equal(position.expand(200, -1).masked_select(begins))
    assert set(lower[0].unique().tolist()) == {0, *begins[0].nonzero()[:, 0].tolist()}
    counts = begins.sum(-1).float()
    assert 1.5 < counts.mean() < 2.5 and counts.max() <= 12 and (counts == 0).any()
    assert lower.equal(fresh_backbone.replays(given))
