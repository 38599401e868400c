"""Top log-probabilities and token masks."""

from __future__ import annotations

import pytest
import torch

import dspark_kernels
import kernel_core
from dspark_kernels import reference
from kernel_core.testing import Guarded, assert_bitwise, assert_close, assert_thread_invariant, at_page_end, each_isa


@each_isa()
def test_top_logprobs(isa):
    with kernel_core.limit_isa(isa):
        for T, V, k in ((0, 5, 2), (3, 1, 1), (4, 20, 20), (4, 257, 5), (3, 4096, 1), (3, 4096, 20), (2, 4096, 400)):
            logits = torch.randn(T, V, generator=torch.Generator().manual_seed(V)).round(decimals=1) * 3
            ids, logprobs = dspark_kernels.top_logprobs(logits, k)
            expected_ids, expected = reference.top_logprobs(logits, k)
            assert_bitwise(ids, expected_ids)
            assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_top_logprobs_of_few_finite_logits():
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [5, 300]] = torch.tensor([1.0, 2.0])
    for call in (dspark_kernels.top_logprobs, reference.top_logprobs, torch.ops.dspark_kernels.top_logprobs):
        ids, logprobs = call(logits, 4)
        assert ids.tolist() == [[300, 5, -1, -1]]
        assert logprobs[0, 2:].tolist() == [-torch.inf] * 2
        assert_close(logprobs[0, :2].exp().sum(), torch.tensor(1.0), atol=1e-6, rtol=0)


def test_top_logprobs_agree_with_the_chosen_one(make_rows):
    rows = make_rows(30, 500)
    tokens, logprobs = dspark_kernels.sample(*rows)
    ids, all_logprobs = dspark_kernels.top_logprobs(rows[0], 500)
    assert_bitwise(all_logprobs[ids == tokens.unsqueeze(1)], logprobs)


def test_top_logprobs_threads():
    logits = torch.randn(2, 129_280, generator=torch.Generator().manual_seed(3))
    assert_thread_invariant(lambda: dspark_kernels.top_logprobs(logits[:1], 20))
    assert_thread_invariant(lambda: dspark_kernels.top_logprobs(logits, 20))


@each_isa()
def test_token_mask(isa):
    with kernel_core.limit_isa(isa):
        for V in (1, 15, 16, 31, 32, 33, 63, 64, 500, 4096):
            g = torch.Generator().manual_seed(V)
            words = -(-V // 32)
            bits = torch.randint(-(2**31), 2**31, (3, words), generator=g).to(torch.int32)
            bits[0] = -1
            bits[1] = 0
            logits = torch.randn(5, V, generator=g)
            for rows in (torch.tensor([4, 0, 2]), None):
                T = 5 if rows is not None else 3
                out, expected = Guarded((T, V)), logits[:T].clone()
                out.tensor.copy_(logits[:T])
                dspark_kernels.apply_token_mask(out.tensor, at_page_end(bits), rows)
                out.check()
                reference.apply_token_mask(expected, bits, rows)
                assert_bitwise(out.tensor, expected, name=f"V={V}")


def test_mask_bits():
    """Bit v % 32 of word v / 32, the sign bit too; bits beyond the vocabulary are ignored."""
    logits = torch.zeros(1, 40)
    dspark_kernels.apply_token_mask(logits, torch.tensor([[-(2**31) + 1, 0b10 | 1 << 20]], dtype=torch.int32))
    assert torch.isfinite(logits).nonzero()[:, 1].tolist() == [0, 31, 33]


def test_mask_backends():
    bits = torch.tensor([[0b1010]], dtype=torch.int32)
    results = [torch.zeros(2, 4) for _ in range(3)]
    dspark_kernels.apply_token_mask(results[0], bits, torch.tensor([1]))
    torch.ops.dspark_kernels.apply_token_mask(results[1], bits, torch.tensor([1]))
    with kernel_core.using("reference"):
        dspark_kernels.apply_token_mask(results[2], bits, torch.tensor([1]))
    assert_bitwise(results[0], results[1])
    assert_bitwise(results[0], results[2])


def test_no_masks_and_no_rows():
    logits = torch.zeros(2, 40)
    dspark_kernels.apply_token_mask(logits, torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
    assert bool((logits == 0).all())
    dspark_kernels.apply_token_mask(torch.zeros(0, 40), torch.zeros(0, 2, dtype=torch.int32))


@pytest.mark.parametrize("backend", ["native", "reference", "library"])
def test_masks_of_rows_that_are_not_there_are_skipped(backend):
    """Masks are laid out for every draft; the scheduler may have cut some of them."""
    logits = torch.zeros(3, 40)
    bits = torch.tensor([[1, 0], [2, 0], [4, 0], [-1, -1]], dtype=torch.int32)
    with kernel_core.using(backend):
        dspark_kernels.apply_token_mask(logits, bits, torch.tensor([2, -1, 0, -1]))
    assert [row.isfinite().nonzero().flatten().tolist() for row in logits] == [[2], list(range(40)), [0]]


@pytest.mark.parametrize("bad", [2, -2])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_mask_checks_rows_before_writing(bad, backend):
    logits = torch.zeros(2, 40)
    with kernel_core.using(backend), pytest.raises(ValueError, match="rows"):
        dspark_kernels.apply_token_mask(logits, torch.zeros(2, 2, dtype=torch.int32), torch.tensor([0, bad]))
    assert bool((logits == 0).all())
