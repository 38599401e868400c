"""The kernels of a speculative step on an NVIDIA GPU: the CPU's results, whatever the batch, in graphs.

Schedules are equal to the bit. Tokens are equal unless a draw lies within rounding of a boundary: exponentials and the
order of sums are not the CPU's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dspark_kernels
from dspark_kernels import (
    Proposals,
    Schedule,
    Verified,
    confidence_head,
    draft_step,
    new_proposals,
    new_schedule,
    new_verified,
    reference_schedule,
    sample,
    schedule,
    verify,
)
from kernel_core.testing import assert_bitwise
from kernel_core.testing.child import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HERE = Path(__file__).parent
MAKE_SCHEDULE = load_file(HERE.parent / "test_schedule.py").make
MAKE_STEP = load_file(HERE.parent / "test_verify.py").make


def there(*values):
    return [v.cuda() if isinstance(v, torch.Tensor) else v for v in values]


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("R", "G", "levels"), [(1, 1, 0), (5, 5, 2), (256, 5, 3), (257, 7, 1), (1000, 5, 0), (1024, 8, 4)]
)
def test_schedules_are_the_cpus(R, G, levels):
    for seed in range(3):
        confidence, tokens, starts, limits, slots, fixed = MAKE_SCHEDULE(R, R + 3, G, seed, levels)
        lists = i32(limits), i32(slots), i32(fixed)
        needed = int(reference_schedule.needed_rows(*lists, G))
        for budget, spare in ((0, 0), (R, 3 * R), (2 * R + 1, 9 * R), (10**9, R), (i32([R]), 2 * R)):
            capacity = max(1, needed + spare)
            expected = schedule(confidence, tokens, starts, lists[0], budget, capacity, slots=lists[1], fixed=lists[2])
            given = there(confidence, tokens, starts, lists[0], budget)
            slots_there, fixed_there = there(lists[1], lists[2])
            got = schedule(*given, capacity, slots=slots_there, fixed=fixed_there)
            torch.cuda.synchronize()
            assert got.host.is_pinned()
            for name, a, b in zip(Schedule._fields, got, expected, strict=True):
                assert_bitwise(a.cpu(), b, name=f"{name}, budget {budget}")


def test_a_schedule_that_does_not_fit_is_all_padding():
    tokens = torch.zeros(2, 4, dtype=torch.int64, device="cuda")
    limits, fixed = there(i32([3, 3]), i32([2, 1]))
    got = schedule(torch.ones(2, 3, device="cuda"), tokens, tokens[:, 0].contiguous(), limits, 6, 4, fixed=fixed)
    torch.cuda.synchronize()
    assert got.host.tolist() == [0, 0, -5] and got.cu_rows.tolist() == [0, 0, 0]


def test_rows_without_filters_are_the_same_in_any_batch():
    """Decided as they are read (many rows) or in separate launches (few): the same bits, repeated, and NaN behind a
    rejected draft changes nothing."""
    (*given, _, _, seeds), coupled, _ = MAKE_STEP(120, 5000, 5, 3)
    logits, drafts, record, cu, positions, temperature = given
    there_ = [logits.cuda(), drafts.cuda(), Proposals(*(t.cuda() for t in record)), *there(cu, positions, temperature)]
    ones, seeds_there, coupled_there = torch.ones(120).cuda(), seeds.cuda(), coupled.cuda()
    assert len(logits) >= 256
    expected = verify(*there_, ones, None, seeds_there, coupled=coupled_there)
    for _ in range(20):
        got = verify(*there_, None, None, seeds_there, coupled=coupled_there)
        for name, a, b in zip(Verified._fields, got, expected, strict=True):
            assert_bitwise(a, b, name=name)
    for r in range(0, 120, 7):
        start, end = int(cu[r]), int(cu[r]) + int(expected.counts[r])
        there_[0][end : int(cu[r + 1])] = torch.nan
        assert end > start
    got = verify(*there_, None, None, seeds_there, coupled=coupled_there)
    assert_bitwise(got.tokens, expected.tokens)
    few = [there_[0][: int(cu[4])], drafts[:4].cuda(), Proposals(*(t[:4].cuda() for t in record)), cu[:5].cuda()]
    alone = verify(*few, positions[: int(cu[4])].cuda(), temperature[:4].cuda(), None, None, seeds_there[:4],
                   coupled=coupled_there[:4])  # fmt: skip
    assert_bitwise(alone.tokens, expected.tokens[:4])


def agreement(a, b):
    return float((a.cpu() == b.cpu()).view(len(a), -1).all(1).float().mean())


@pytest.mark.parametrize("V", [7, 1000, 1024, 4097, 20_000])
def test_sampling(V, make_rows):
    rows = make_rows(200, V, 3.0)
    rows[0][100:] = rows[0][100:].round()
    rows[0][7] = torch.nan
    rows[0][10:20, 3 : V - 2] = -torch.inf
    tokens, logprobs = sample(*rows)
    got, got_logprobs = (t.cpu() for t in sample(*there(*rows)))
    assert agreement(got, tokens) > 0.97
    same = (got == tokens) & (tokens >= 0)
    torch.testing.assert_close(got_logprobs[same], logprobs[same], atol=2e-5, rtol=1e-5)
    assert got[7] == -1 and bool(got_logprobs[7].isnan())
    for r in range(0, 200, 29):
        alone = sample(*there(*(t[r : r + 1] for t in rows)))
        assert_bitwise(alone[0].cpu(), got[r : r + 1])
    for _ in range(5):
        assert_bitwise(sample(*there(*rows))[0].cpu(), got)


@pytest.mark.parametrize(("V", "G", "R"), [(33, 5, 200), (3000, 2, 40)])
def test_verification(V, G, R):
    arguments, coupled, _ = MAKE_STEP(R, V, G, 1)
    logits, drafts, record, *rest = arguments
    logits[3] = torch.nan
    record.tokens[5, 0] = -1
    expected = verify(*arguments, coupled=coupled)
    got = verify(*there(logits, drafts), Proposals(*there(*record)), *there(*rest), coupled=coupled.cuda())
    assert agreement(got.tokens, expected.tokens) > 0.97
    same = (got.tokens.cpu() == expected.tokens).all(1)
    for name, a, b in zip(Verified._fields, got, expected, strict=True):
        if a.dtype is torch.float32:
            torch.testing.assert_close(a.cpu()[same], b[same], atol=3e-5, rtol=1e-5, equal_nan=True)
        else:
            assert_bitwise(a.cpu()[same], b[same], name=name)


@pytest.mark.parametrize("V", [33, 3000])
def test_draft_steps(V, make_rows):
    logits, *parameters = make_rows(60, V)
    block = torch.randn(60, 3, V)
    block[:, 1] = logits
    bias, coupled = torch.randn(60, V), torch.arange(60) % 3 == 0
    mine, out, records = block.cuda(), new_proposals(60, 2), new_proposals(60, 2, "cuda")
    tokens = draft_step(block, 1, bias, *parameters, out, coupled=coupled)
    got = draft_step(mine, 1, *there(bias, *parameters), records, coupled=coupled.cuda())
    assert_bitwise(mine.cpu(), block)
    assert agreement(got, tokens) > 0.97
    same = got.cpu() == tokens
    for a, b in zip(records[1:5], out[1:5], strict=True):
        torch.testing.assert_close(a.cpu()[same], b[same], atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("B", "H", "M"), [(1, 5120, 256), (64, 5120, 256), (9, 33, 7)])
def test_confidence_head(B, H, M):
    hidden, markov, weight = torch.randn(B, 6, H), torch.randn(B, 5, M), torch.randn(H + M) / 50
    temperatures = torch.rand(5) + 0.5
    expected = confidence_head(hidden[:, :5], markov, weight, temperatures)
    got = confidence_head(hidden.cuda()[:, :5], *there(markov, weight, temperatures))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-4, rtol=1e-4)
    alone = confidence_head(hidden[:1].cuda()[:, :5], *there(markov[:1], weight, temperatures))
    assert_bitwise(alone[0].cpu(), got[0][:1].cpu())


def test_masks():
    logits, masks = torch.randn(9, 4100), torch.randint(-(2**31), 2**31, (4, 129)).int()
    at, mine = torch.tensor([8, -1, 0, 3]), logits.cuda()
    dspark_kernels.apply_token_mask(logits, masks, at)
    dspark_kernels.apply_token_mask(mine, *there(masks, at))
    assert_bitwise(mine.cpu(), logits)


def test_a_step_in_a_graph():
    """No allocation of its own in the way, and nothing waits for the device."""
    confidence, tokens, starts, limits, slots, _ = MAKE_SCHEDULE(64, 70, 5, 0, 3)
    given = there(confidence, tokens, starts, i32(limits), i32([99]))
    slots_there = i32(slots).cuda()
    room, out = new_schedule(64, 5, 200, "cuda"), new_verified(40, 5, "cuda")
    (logits, drafts, record, *rest), coupled, _ = MAKE_STEP(40, 50, 5, 1)
    step = [*there(logits, drafts), Proposals(*there(*record)), *there(*rest)]
    coupled = coupled.cuda()

    def run():
        schedule(*given, 200, slots=slots_there, out=room)
        verify(*step, coupled=coupled, out=out)

    run()
    torch.cuda.synchronize()
    expected = [t.clone() for t in (*room, *out)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for tensor in (*room, *out):
        tensor.fill_(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for a, b in zip((*room, *out), expected, strict=True):
        assert_bitwise(a.nan_to_num(), b.nan_to_num())


def test_first_tokens_follow_the_target():
    R = 40_000
    p, q = torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.1, 0.2])
    settings = torch.ones(R, device="cuda"), torch.ones(R, device="cuda"), None, torch.arange(R, device="cuda")
    zeros, record = torch.zeros(R, dtype=torch.int64, device="cuda"), new_proposals(R, 1, "cuda")
    drafts = q.log().expand(R, 1, 4).contiguous().cuda()
    draft_step(drafts, 0, None, *settings, zeros, record)
    logits = p.log().expand(2 * R, 4).contiguous().cuda()
    cu, places = torch.arange(0, 2 * R + 1, 2).int().cuda(), (torch.arange(2 * R) % 2).cuda()
    out = verify(logits, drafts, record, cu, places, *settings)
    counts = torch.bincount(out.tokens[:, 0].cpu(), minlength=4)
    assert float(((counts - R * p) ** 2 / (R * p)).sum()) < 21, "three degrees of freedom"
    assert abs(float(out.accepted.float().mean()) - 0.6) < 0.015
