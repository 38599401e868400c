"""Draft steps: the bias, the draw, and a record that gives the distribution back."""

from __future__ import annotations

import pytest
import torch

import dspark_kernels
import kernel_core
from dspark_kernels import Proposals, draft_step, new_proposals, reference, reference_verify
from kernel_core.testing import assert_bitwise, assert_close, assert_thread_invariant, each_isa


def make(make_rows, B=30, V=257, G=3):
    logits, *parameters = make_rows(B, V)
    block = torch.randn(B, G + 1, V, generator=torch.Generator().manual_seed(V))
    block[:, 1] = logits
    return block, torch.randn(B, V, generator=torch.Generator().manual_seed(1)), parameters


@each_isa()
@pytest.mark.parametrize("V", [1, 31, 256, 2000])
def test_equals_the_reference(isa, V, make_rows):
    with kernel_core.limit_isa(isa):
        block, bias, parameters = make(make_rows, V=V)
        coupled = torch.arange(30) % 3 == 0
        results = []
        for backend in ("native", "reference"):
            logits, out = block.clone(), new_proposals(30, 3)
            with kernel_core.using(backend):
                tokens = draft_step(logits, 1, bias, *parameters, out, coupled=coupled)
            results.append((logits, tokens, out))
        (a_logits, a, a_out), (b_logits, b, b_out) = results
        assert_bitwise(a_logits, b_logits)
        assert_bitwise(a, b)
        for name, x, y in zip(Proposals._fields, a_out, b_out, strict=True):
            if x.dtype.is_floating_point:
                assert_close(x, y, atol=1e-5, rtol=1e-5, name=name)
            else:
                assert_bitwise(x, y, name=name)


def test_the_draw_is_that_of_sample(make_rows):
    """Draw 1 at the new token's position, 0 for coupled rows; other columns stay as they are."""
    block, bias, parameters = make(make_rows)
    before, out = block.clone(), new_proposals(30, 3)
    coupled = torch.arange(30) % 3 == 0
    tokens = draft_step(block, 1, bias, *parameters, out, coupled=coupled)
    temperature, top_p, top_k, seeds, positions = parameters
    rows = before[:, 1] + bias
    for case, chosen in ((0, coupled), (1, ~coupled)):
        expected, _ = dspark_kernels.sample(rows, temperature, top_p, top_k, seeds, positions + 2, case=case)
        assert_bitwise(tokens[chosen], expected[chosen])
    assert_bitwise(block[:, 1].contiguous(), rows)
    for k in (0, 2, 3):
        assert_bitwise(block[:, k].contiguous(), before[:, k].contiguous())
    assert_bitwise(out.tokens[:, 1].contiguous(), tokens)
    assert bool((out.tokens[:, [0, 2]] == -1).all()) and bool(out.mass[:, [0, 2]].isnan().all())


def test_the_record_gives_the_distribution_back(make_rows):
    for V in (5, 300, 3000):
        block, bias, parameters = make(make_rows, V=V)
        out = new_proposals(30, 3)
        tokens = draft_step(block, 0, bias, *parameters, out)
        given = reference_verify.probabilities(block[:, 0], *(column[:, 0] for column in out[2:]))
        expected = reference.distribution(block[:, 0].contiguous(), *parameters[:3])
        far = (given - expected).abs().amax(1) > 1e-5
        # Top-p may cut one token further where rounding decides; then the record and the draw still agree.
        assert int(far.sum()) <= 1
        assert_close(given.sum(1), torch.ones(30, dtype=torch.float64), atol=1e-5, rtol=0)
        mine = given.gather(1, tokens.unsqueeze(1)).squeeze(1)
        assert bool((mine > 0).all())
        assert_close(out.logprobs[:, 0].contiguous(), mine.log().float(), atol=1e-5, rtol=1e-5)


def test_dispatcher(make_rows):
    block, bias, parameters = make(make_rows)
    ours, out, theirs, there = block.clone(), new_proposals(30, 3), block.clone(), new_proposals(30, 3)
    tokens = draft_step(ours, 2, bias, *parameters, out)
    assert_bitwise(tokens, torch.ops.dspark_kernels.draft_step(theirs, 2, bias, *parameters, list(there)))
    for a, b in zip((ours, *out), (theirs, *there), strict=True):
        assert_bitwise(a, b)


def test_rows_without_a_distribution():
    logits, out = torch.zeros(4, 2, 20), new_proposals(4, 2)
    logits[0, 1, 3] = torch.nan
    logits[1, 1] = -torch.inf
    logits[2, 1, 0] = torch.inf
    ones, ids = torch.ones(4), torch.arange(4)
    for backend in ("native", "reference"):
        with kernel_core.using(backend):
            tokens = draft_step(logits, 1, None, ones, ones, None, ids, ids, out)
        assert tokens[:3].tolist() == [-1] * 3 and 0 <= int(tokens[3]) < 20
        assert bool(out.logprobs[:3, 1].isnan().all()) and bool(out.logprobs[3, 1].isfinite())


def test_threads(make_rows):
    block, bias, parameters = make(make_rows, B=6, V=129_280, G=1)

    def run():
        out = new_proposals(6, 1)
        tokens = draft_step(block.clone(), 0, bias, *parameters, out)
        return (tokens, *out)

    assert_thread_invariant(run)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("logits", {"logits": torch.zeros(2, 8, 3).transpose(1, 2)}),
        ("logits", {"logits": torch.zeros(2, 3, 8).double()}),
        ("k", {"k": 2}),
        ("k", {"k": -1}),
        ("bias", {"bias": torch.zeros(2, 7)}),
        ("temperature", {"temperature": torch.tensor([1.0, -1.0])}),
        ("top_p", {"top_p": torch.tensor([1.0, 0.0])}),
        ("top_k", {"top_k": torch.tensor([1, 1])}),
        ("seeds", {"seeds": torch.zeros(2)}),
        ("positions", {"positions": torch.zeros(3, dtype=torch.int64)}),
        ("out", {"out": new_proposals(2, 4)}),
        ("out", {"out": new_proposals(3, 2)}),
        ("coupled", {"coupled": torch.zeros(2)}),
    ],
)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_bad_arguments_are_named_before_anything_is_written(backend, name, change):
    out = new_proposals(2, 2)
    arguments = {
        "logits": torch.zeros(2, 3, 8), "k": 1, "bias": torch.ones(2, 8), "temperature": torch.ones(2),
        "top_p": torch.ones(2), "top_k": torch.zeros(2, dtype=torch.int32), "seeds": torch.zeros(2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64), "out": out, **change,
    }  # fmt: skip
    with kernel_core.using(backend), pytest.raises(ValueError, match=f"{name}.*got .*allowed"):
        draft_step(**arguments)
    assert bool((out.tokens == -1).all()) and bool((arguments["logits"] == 0).all())
