"""What is chosen, row by row: against the reference, at the edges, and whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

import dspark_kernels
import kernel_core
from dspark_kernels import reference
from kernel_core.testing import (
    assert_bitwise,
    assert_close,
    assert_repeatable,
    assert_row_invariant,
    assert_thread_invariant,
    at_page_end,
    each_isa,
)

INF, NAN = torch.inf, torch.nan


def params(T: int, temperature=1.0, top_p=1.0, top_k=0, seed=3, position=5):
    return (
        torch.full((T,), temperature), torch.full((T,), top_p), torch.full((T,), top_k, dtype=torch.int32),
        torch.full((T,), seed), torch.full((T,), position),
    )  # fmt: skip


def assert_draws_agree(tokens, logits, temperature, top_p, top_k, seeds, positions):
    """The reference's cumulative distribution passes u at the token, up to rounding; top-p's cut up to rounding."""
    expected, _ = reference.sample(logits, temperature, top_p, top_k, seeds, positions)
    u = reference.uniform(seeds, positions)
    for t in (tokens != expected).nonzero().flatten().tolist():
        close = False
        for nudge in (-1e-5, 0.0, 1e-5):
            p = (top_p[t : t + 1] + nudge).clamp(1e-9, 1.0) if top_p[t] < 1 else top_p[t : t + 1]
            probs = reference.distribution(logits[t : t + 1], temperature[t : t + 1], p, top_k[t : t + 1])[0]
            end = probs.cumsum(0)[tokens[t]]
            close |= bool(probs[tokens[t]] > 0 and end - probs[tokens[t]] - 1e-5 <= u[t] <= end + 1e-5)
        assert close, f"row {t}: got {tokens[t]}, expected {expected[t]}"


@each_isa()
@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0, 30.0])
def test_matches_the_reference(isa, spread, make_rows):
    with kernel_core.limit_isa(isa):
        for T, V in ((0, 40), (30, 1), (30, 2), (60, 33), (60, 255), (60, 256), (60, 257), (60, 512), (40, 4096)):
            rows = make_rows(T, V, spread)
            tokens, logprobs = dspark_kernels.sample(*rows)
            assert_draws_agree(tokens, *rows)
            expected = rows[0].double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            assert_close(logprobs, expected.float(), atol=1e-5, rtol=1e-5, name=f"V={V}")


@each_isa()
def test_many_ties(isa, make_rows):
    """Whole-numbered logits: the cut falls inside a run of equals nearly always."""
    with kernel_core.limit_isa(isa):
        for V in (70, 300, 2000):
            logits, *rest = make_rows(60, V, 1.5)
            rows = (logits.round(), *rest)
            assert_draws_agree(dspark_kernels.sample(*rows)[0], *rows)


def test_full_vocabulary(make_rows):
    for spread in (0.5, 3.0):
        rows = make_rows(12, 129_280, spread)
        assert_draws_agree(dspark_kernels.sample(*rows)[0], *rows)


def test_flat_full_vocabulary(make_rows):
    """Every token is a candidate: the cut by mass falls among equals and the lower ids stay."""
    V = 129_280
    logits = torch.zeros(8, V)
    ones, ids = torch.ones(8), torch.arange(8)
    tokens, _ = dspark_kernels.sample(logits, ones, ones / 4, None, ids, ids)
    assert bool((tokens < V // 4 + 2).all())
    tokens, _ = dspark_kernels.sample(logits, *params(8, top_k=9)[:3], ids, ids)
    assert bool((tokens < 9).all())


@each_isa()
def test_greedy_takes_the_lowest_of_equals(isa):
    with kernel_core.limit_isa(isa):
        for V in (1, 5, 300, 5000):
            for place in {0, V // 3, V - 1}:
                logits = torch.full((1, V), -1.0)
                logits[0, place:] = 2.0
                for temperature in (0.0, 9e-6):
                    tokens, _ = dspark_kernels.sample(logits, *params(1, temperature, top_p=0.1, top_k=1))
                    assert tokens.item() == place


def test_zeros_of_both_signs_are_equal():
    logits = torch.tensor([[-1.0, -0.0, 0.0]])
    assert dspark_kernels.sample(logits, *params(1, temperature=0.0))[0].item() == 1
    assert dspark_kernels.sample(logits, *params(1, top_k=1))[0].item() == 1
    assert dspark_kernels.top_logprobs(logits, 2)[0].tolist() == [[1, 2]]


def test_ties_at_the_cut_go_to_lower_ids(draw):
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0, 3.0])
    assert set(draw(logits, 300, top_k=2).tolist()) == {1, 2}
    assert set(draw(logits, 300, top_p=0.5).tolist()) == {1, 2, 3}


def test_top_p_keeps_the_token_that_crosses(draw):
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert set(draw(logits, 400, top_p=0.45).tolist()) == {1}
    assert set(draw(logits, 400, top_p=0.55).tolist()) == {1, 3}
    assert set(draw(logits, 400, top_p=0.8).tolist()) == {1, 2, 3}
    assert set(draw(logits, 400, top_p=1e-9).tolist()) == {1}


def test_top_p_comes_before_top_k(draw):
    """Top-p sees the whole distribution: 0.4 + 0.3 reach 0.6, so two of the three that top-k keeps."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draw(logits, 400, top_p=0.6, top_k=3).tolist()) == {0, 1}
    assert set(draw(logits, 400, top_p=0.95, top_k=2).tolist()) == {0, 1}


def test_masked_tokens_never_come(draw):
    logits = torch.randn(700, generator=torch.Generator().manual_seed(1))
    allowed = torch.zeros(700, dtype=torch.bool)
    allowed[[3, 255, 256, 699]] = True
    logits[~allowed] = -INF
    for options in (
        {},
        {"top_p": 0.999},
        {"top_k": 50},
        {"temperature": 5.0},
        {"temperature": 0.0},
        {"temperature": 1e-5},
    ):
        tokens = draw(logits, 500, **options)
        assert bool(allowed[tokens].all())


def test_single_finite_logit_has_probability_one():
    for value in (-3e38, 0.0, 3e38):
        logits = torch.full((1, 1000), -INF)
        logits[0, 777] = value
        for p in ({}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"temperature": 100.0}):
            tokens, logprobs = dspark_kernels.sample(logits, *params(1, **p))
            assert tokens.item() == 777 and logprobs.item() == 0.0


@each_isa()
def test_rows_without_a_distribution_are_flagged(isa):
    """-1 and NaN, alone: the rows beside them are served."""
    with kernel_core.limit_isa(isa):
        for V in (1, 31, 300, 1000):
            logits = torch.zeros(5, V)
            logits[0] = -INF
            logits[1, V - 1] = NAN
            logits[2, V // 2] = INF
            logits[3] = NAN
            for p in ({}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2}):
                tokens, logprobs = dspark_kernels.sample(logits, *params(5, **p))
                assert tokens[:4].tolist() == [-1] * 4 and logprobs[:4].isnan().all()
                assert 0 <= tokens[4] < V and torch.isfinite(logprobs[4])
                expected = reference.sample(logits, *params(5, **p))
                assert tokens[:4].tolist() == expected[0][:4].tolist()
            ids, best = dspark_kernels.top_logprobs(logits, 1)
            assert ids[:4].flatten().tolist() == [-1] * 4 and best[:4].isnan().all()


def test_huge_logits():
    logits = torch.tensor([[1e30, -1e30, 1e30, 0.0]])
    tokens, logprobs = dspark_kernels.sample(
        logits.expand(200, 4).contiguous(), *params(200)[:3], torch.arange(200), torch.arange(200)
    )
    assert set(tokens.tolist()) == {0, 2}
    assert_close(logprobs, torch.full((200,), 0.5).log(), atol=1e-6, rtol=0)


def test_filters_that_let_everything_through_change_nothing(make_rows):
    logits, _, _, _, seeds, positions = make_rows(50, 700)
    ones = torch.ones(50)
    plain = dspark_kernels.sample(logits, ones, ones, None, seeds, positions)
    for top_k in (0, 700, 10_000):
        same = dspark_kernels.sample(logits, ones, ones, torch.full((50,), top_k, dtype=torch.int32), seeds, positions)
        for a, b in zip(plain, same, strict=True):
            assert_bitwise(a, b)


@each_isa()
def test_batch_invariance(isa, make_rows):
    with kernel_core.limit_isa(isa):
        rows = make_rows(23, 1300)
        assert_row_invariant(lambda *r: dspark_kernels.sample(*r), *rows)
        assert_row_invariant(lambda x: dspark_kernels.top_logprobs(x, 7), rows[0])


def test_threads_and_repetition(make_rows):
    for T in (1, 3):
        rows = make_rows(T + 2, 129_280)
        rows = tuple(r[2:].contiguous() for r in rows)
        assert_thread_invariant(lambda rows=rows: dspark_kernels.sample(*rows))
        assert_repeatable(lambda rows=rows: dspark_kernels.sample(*rows), times=5)


def test_reads_the_row_only(make_rows):
    for V in (1, 17, 300, 513):
        rows = make_rows(3, V)
        guarded = tuple(at_page_end(r) for r in rows)
        for a, b in zip(dspark_kernels.sample(*guarded), dspark_kernels.sample(*rows), strict=True):
            assert_bitwise(a, b)


def test_reference_backend_and_dispatcher(make_rows):
    rows = make_rows(20, 90)
    native = dspark_kernels.sample(*rows, case=2)
    for a, b in zip(native, torch.ops.dspark_kernels.sample(*rows, case=2), strict=True):
        assert_bitwise(a, b)
    with kernel_core.using("reference"):
        tokens, logprobs = dspark_kernels.sample(*rows, case=2)
    assert tokens.tolist() == native[0].tolist()
    assert_close(native[1], logprobs, atol=1e-5, rtol=1e-5)
