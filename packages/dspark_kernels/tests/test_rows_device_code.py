"""The device's own code for sampling, drafting and verifying, run by host threads: what threads exchange, index and
store, not their races. Exponentials are the host's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from dspark_kernels import (
    Proposals,
    Verified,
    confidence_head,
    draft_step,
    new_proposals,
    new_verified,
    reference,
    reference_verify,
)
from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.child import load_file
from kernel_core.testing.host import host_library

HERE = Path(__file__).parent
THREADS = HERE.parents[1] / "mla_fp4" / "tests" / "host"
VERIFY = load_file(HERE / "test_verify.py")
SAMPLE = load_file(HERE / "test_sample.py")


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    if not (THREADS / "threads.hpp").is_file():
        pytest.skip("needs the checkout: a block on host threads stands in mla_fp4's tests")
    folder = tmp_path_factory.mktemp("rows")
    return host_library(HERE / "host/rows_threads.cpp", folder, HERE.parent / "csrc", THREADS)


def pointers(*tensors):
    return (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])


def sizes(*numbers):
    return [ctypes.c_int64(n) for n in numbers]


def sample(lib, logits, temperature, top_p, top_k, seeds, positions, case=0, threads=64, parts=2):
    T, V = logits.shape
    tokens, logprobs = torch.full((T,), -9), torch.full((T,), -9.0)
    given = pointers(logits, temperature, top_p, top_k, seeds, positions, tokens, logprobs)
    lib.sample_host(*sizes(T, V, case), given, threads, parts)
    return tokens, logprobs


@pytest.mark.parametrize(
    ("V", "spread"),
    [
        (1, 1.0),
        (5, 2.0),
        (1023, 2.0),
        (1024, 0.0),
        (2100, 3.0),
        (2101, 0.3),
        (2102, 5e-4),
        (9000, 30.0),
        (20_000, 3.0),
        (140_000, 3.0),
    ],
)
def test_sampling(lib, V, spread, make_rows):
    rows = make_rows(12, V, spread)
    tokens, logprobs = sample(lib, *rows)
    SAMPLE.assert_draws_agree(tokens, *rows)
    expected = rows[0].double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert_close(logprobs, expected.float(), atol=1e-5, rtol=1e-5)


def test_sampling_among_many_equals(lib, make_rows):
    """Whole-numbered logits over several blocks: more equals than are sorted at the cut."""
    logits, *rest = make_rows(12, 3000, 1.0)
    rows = (logits.round(), *rest)
    SAMPLE.assert_draws_agree(sample(lib, *rows)[0], *rows)


@pytest.mark.parametrize("V", [6, 1500, 3000])
def test_masked_rows_with_filters(lib, V):
    """Fewer tokens are allowed than top-k would keep, alone in their blocks or together."""
    logits = torch.full((24, V), -torch.inf)
    allowed = torch.tensor([1, V // 2, V - 1])
    logits[:, allowed] = torch.tensor([0.5, 1.0, 0.0])
    seeds = torch.arange(24)
    for temperature, top_p, top_k in ((1.0, 1.0, 50), (1.0, 1.0, 4), (0.7, 0.9, 50), (1.0, 0.999, 0), (1.0, 1.0, 2)):
        rows = (logits, torch.full((24,), temperature), torch.full((24,), top_p),
                torch.full((24,), top_k, dtype=torch.int32), seeds, seeds)  # fmt: skip
        tokens, _ = sample(lib, *rows)
        assert bool(torch.isin(tokens, allowed).all()) and len(tokens.unique()) > 1
        SAMPLE.assert_draws_agree(tokens, *rows)


def test_no_bit_depends_on_the_batch(lib, make_rows):
    """Nor on how many teams share a row."""
    rows = make_rows(6, 5000)
    together = sample(lib, *rows, threads=96, parts=1)
    for r in (0, 4, 5):
        alone = sample(lib, *(t[r : r + 1] for t in rows), threads=96, parts=3)
        for a, b in zip(alone, together, strict=True):
            assert_bitwise(a, b[r : r + 1])


def test_rows_without_a_distribution(lib):
    V = 1100
    logits = torch.zeros(5, V)
    logits[0] = -torch.inf
    logits[1, V - 1] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = torch.nan
    logits[4, :1000] = -torch.inf
    for p in ({}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2}):
        tokens, logprobs = sample(lib, logits, *SAMPLE.params(5, **p))
        assert tokens[:4].tolist() == [-1] * 4 and bool(logprobs[:4].isnan().all())
        assert 1000 <= int(tokens[4]) < V


@pytest.mark.parametrize("V", [30, 1500])
def test_draft_steps(lib, V, make_rows):
    B, G, k = 8, 3, 1
    logits, *parameters = make_rows(B, V)
    block = torch.randn(B, G + 1, V, generator=torch.Generator().manual_seed(V))
    block[:, k] = logits
    block[2, k, 3] = torch.nan
    bias, coupled = torch.randn(B, V), torch.arange(B) % 3 == 0
    mine, out = block.clone(), new_proposals(B, G)
    chosen = torch.full((B,), -9)
    temperature, top_p, top_k, seeds, positions = parameters
    given = pointers(mine[:, k], bias, temperature, top_p, top_k, seeds, positions, coupled, chosen, *out)
    lib.draft_host(*sizes(B, V, G, k, mine.stride(0)), given, 64, 2)
    theirs, expected = block.clone(), new_proposals(B, G)
    tokens = draft_step(theirs, k, bias, *parameters, expected, coupled=coupled)
    assert_bitwise(mine, theirs)
    assert_bitwise(chosen, tokens)
    for name, a, b in zip(Proposals._fields, out, expected, strict=True):
        if a.dtype.is_floating_point:
            assert_close(a, b, atol=1e-5, rtol=1e-5, name=name)
        else:
            assert_bitwise(a, b, name=name)


@pytest.mark.parametrize(("H", "M", "vectors"), [(24, 8, 1), (21, 3, 0), (200, 64, 1)])
def test_confidence_head(lib, H, M, vectors):
    hidden, markov, weight = torch.randn(3, 7, H)[:, :5], torch.randn(3, 5, M), torch.randn(H + M)
    temperatures = torch.rand(5) + 0.5
    hidden[1, 2, 0] = torch.nan
    out = [torch.full((3, 5), -9.0) for _ in range(3)]
    given = pointers(hidden, markov, weight, temperatures, *out)
    lib.confidence_host(*sizes(3, 5, H, M, hidden.stride(0), hidden.stride(1)), given, vectors)
    for a, b in zip(out, confidence_head(hidden, markov, weight, temperatures), strict=True):
        assert_close(a, b, atol=1e-5, rtol=1e-5)


def verify(lib, arguments, coupled, slots=None, threads=64, parts=2, each=0) -> Verified:
    logits, drafts, record, cu, positions, *s = arguments
    R, (N, V), G = len(cu) - 1, logits.shape, 0 if record is None else record.tokens.shape[1]
    out = new_verified(R, G)
    for tensor in out:
        tensor.fill_(1)
    records = [None] * 6 if record is None else record
    given = pointers(logits, drafts, *records, cu, positions, *s, slots, coupled, *out)
    strides = (0, 0) if drafts is None else drafts.stride()[:2]
    lib.verify_host(*sizes(R, N, V, G, *strides), given, threads, parts, each)
    return out


@pytest.mark.parametrize(("V", "G"), [(2, 1), (7, 5), (1030, 2), (5000, 1)])
def test_verification(lib, V, G):
    arguments, coupled, _ = VERIFY.make(14, V, G, 1)
    arguments[2].tokens[4, 0] = -1
    arguments[0][3] = torch.nan
    out = verify(lib, arguments, coupled)
    expected = reference_verify.verify(*arguments, None, coupled)
    for name, a, b in zip(Verified._fields, out, expected, strict=True):
        if name != "logprobs":
            assert_bitwise(a, b, name=name)
    assert_close(out.logprobs, expected.logprobs, atol=2e-5, rtol=1e-5)
    assert len(out.accepted.unique()) > 1


@pytest.mark.parametrize(("V", "G", "parts", "each"), [(2, 1, 1, 1), (7, 5, 2, 1), (5000, 1, 3, 1), (9000, 3, 2, 2)])
def test_one_flow_gives_the_same_bits(lib, V, G, parts, each):
    """Though rows behind a rejected draft stay unread: NaN there changes nothing that is emitted."""
    arguments, coupled, lengths = VERIFY.make(14, V, G, 1)
    arguments[2].tokens[4, 0] = -1
    arguments[0][3] = torch.nan
    expected = verify(lib, arguments, coupled)
    for a, b in zip(verify(lib, arguments, coupled, parts=parts, each=each), expected, strict=True):
        assert_bitwise(a, b)
    behind = expected.accepted < lengths
    last = arguments[3][1:][behind].long() - 1  # the bonus row of a request that ends before it
    assert len(last)
    arguments[0][last] = torch.nan
    for a, b in zip(verify(lib, arguments, coupled, parts=parts, each=each), expected, strict=True):
        assert_bitwise(a, b)


def test_verification_without_drafts_is_sampling(lib, make_rows):
    logits, temperature, top_p, top_k, seeds, positions = make_rows(6, 50)
    cu = torch.arange(7, dtype=torch.int32)
    out = verify(lib, (logits, None, None, cu, positions, temperature, top_p, top_k, seeds), None)
    expected, _ = reference.sample(logits, temperature, top_p, top_k, seeds, positions + 1)
    assert_bitwise(out.tokens[:, 0], expected)


def test_padding_requests_and_slots(lib):
    (logits, drafts, record, cu, positions, *s), coupled, lengths = VERIFY.make(5, 20, 2)
    order = torch.tensor([3, 0, 4])
    rows = torch.cat([torch.arange(int(cu[r]), int(cu[r + 1])) for r in order.tolist()])
    counts = (lengths + 1)[order]
    moved = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0), counts.sum().view(1)]).int()
    options = [torch.cat([t[order], t[:1]]) for t in s]
    slots = torch.tensor([3, 0, 4, -1], dtype=torch.int32)
    arguments = (logits[rows].contiguous(), drafts, record, moved, positions[rows].contiguous(), *options)
    for each in (0, 1):
        out = verify(lib, arguments, torch.cat([coupled[order], coupled[:1]]), slots, each=each)
        check_padding(out, logits, drafts, record, cu, positions, s, coupled, order)


def check_padding(out, logits, drafts, record, cu, positions, s, coupled, order):
    plain = reference_verify.verify(logits, drafts, record, cu, positions, *s, None, coupled)
    assert_bitwise(out.tokens[:3].contiguous(), plain.tokens[order])
    assert out.tokens[3].tolist() == [-1] * 3 and int(out.counts[3]) == 0 and int(out.last[3]) == -1
