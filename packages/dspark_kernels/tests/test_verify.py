"""Verification row by row: against the reference, against sampling without drafts, and where something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dspark_kernels
import kernel_core
from dspark_kernels import Verified, new_proposals, new_verified, reference_verify, verify
from kernel_core.testing import assert_bitwise, assert_close, assert_repeatable, assert_thread_invariant, each_isa
from kernel_core.testing.child import load_file

CASES = load_file(Path(__file__).with_name("spec_cases.py"))
Settings, columns, draft, settings, step, target_rows = (
    CASES.Settings, CASES.columns, CASES.draft, CASES.settings, CASES.step, CASES.target_rows
)  # fmt: skip

INF, NAN = torch.inf, torch.nan


def make(R: int, V: int, G: int, seed: int = 0, spread: float = 2.0, like: float = 0.5):
    """R requests of every kind: arguments of `verify`. `like`: how near the drafter is to the target."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randn(min(V, 40), V, generator=g) * spread
    drafter = like * target + (1 - like) * torch.randn(target.shape, generator=g) * spread
    temperature = 0.3 + torch.rand(R, generator=g)
    temperature[::5], temperature[1::5] = 0.0, 1.0
    top_p = 0.3 + 0.7 * torch.rand(R, generator=g)
    top_p[::2] = 1.0
    top_k = torch.randint(0, 20, (R,), generator=g, dtype=torch.int32)
    top_k[::3] = 0
    s = Settings(temperature, top_p, top_k, torch.randint(-(2**62), 2**62, (R,), generator=g))
    count = len(target)
    anchors, positions = torch.randint(0, count, (R,), generator=g), torch.randint(0, 2**20, (R,), generator=g)
    coupled = torch.arange(R) % 4 == 3
    drafts, record = draft(drafter, anchors, positions, G, s, coupled=coupled)
    lengths = torch.randint(0, G + 1, (R,), generator=g)
    logits, cu, place, owner = target_rows(target, anchors, record.tokens, lengths)
    arguments = (logits, drafts, record, cu, positions[owner] + place, *s)
    return arguments, coupled, lengths


@each_isa()
@pytest.mark.parametrize(("V", "G"), [(2, 1), (7, 5), (255, 3), (257, 8), (520, 5)])
def test_equals_the_reference(isa, V, G):
    with kernel_core.limit_isa(isa):
        for seed in range(3):
            arguments, coupled, _ = make(40, V, G, seed)
            native = verify(*arguments, coupled=coupled)
            expected = reference_verify.verify(*arguments, None, coupled)
            for name, a, b in zip(Verified._fields, native, expected, strict=True):
                if name != "logprobs":
                    assert_bitwise(a, b, name=name)
            assert_close(native.logprobs, expected.logprobs, atol=2e-5, rtol=1e-5)


def test_full_vocabulary():
    arguments, coupled, _ = make(6, 129_280, 2, spread=3.0)
    native = verify(*arguments, coupled=coupled)
    expected = reference_verify.verify(*arguments, None, coupled)
    assert_bitwise(native.tokens, expected.tokens)


def test_what_is_emitted_is_complete_and_nothing_else():
    arguments, coupled, lengths = make(60, 50, 5)
    record = arguments[2]
    out = verify(*arguments, coupled=coupled)
    assert_bitwise(out.counts, out.accepted + 1)
    assert bool((out.accepted <= lengths).all()) and not bool(out.failed.any())
    assert len(out.accepted.unique()) > 3, "too uniform to show anything"
    for r, accepted in enumerate(out.accepted.tolist()):
        assert out.tokens[r, :accepted].tolist() == record.tokens[r, :accepted].tolist()
        assert out.tokens[r, accepted + 1 :].tolist() == [-1] * (5 - accepted)
        assert int(out.last[r]) == int(out.tokens[r, accepted]) >= 0
        if accepted < int(lengths[r]):
            assert int(out.last[r]) != int(record.tokens[r, accepted]), "a rejected draft came again"
        row = arguments[0][arguments[3][r] :][: accepted + 1].double().log_softmax(-1)
        exact = row.gather(1, out.tokens[r, : accepted + 1].unsqueeze(1)).squeeze(1)
        assert_close(out.logprobs[r, : accepted + 1], exact.float(), atol=1e-5, rtol=1e-5)
        assert bool(out.logprobs[r, accepted + 1 :].isnan().all())


def chain_of(target, anchors, positions, s, count):
    """`count` tokens one by one, without drafts."""
    made = []
    for n in range(count):
        rows = target[anchors].contiguous()
        anchors, _ = dspark_kernels.sample(rows, s.temperature, s.top_p, s.top_k, s.seeds, positions + 1 + n)
        made.append(anchors)
    return torch.stack(made, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("G", [1, 4])
def test_coupled_and_greedy_requests_give_the_tokens_of_no_drafts(temperature, G):
    """At any number of drafts, which changes from step to step."""
    V, R, wanted = 30, 50, 8
    target = torch.randn(V, V, generator=torch.Generator().manual_seed(5)) * 2
    drafter = target + torch.randn(V, V, generator=torch.Generator().manual_seed(6))
    s = settings(R, temperature, 0.95, 0)
    coupled = torch.full((R,), temperature > 0)
    anchors, at = torch.arange(R) % V, torch.zeros(R, dtype=torch.int64)
    alone = chain_of(target, anchors, at, s, wanted + G + 1)
    accepted = 0
    for number in range(wanted):
        lengths = (torch.arange(R) * 7 + number) % (G + 1)
        out = step(target, drafter, anchors, at, lengths, G, s, coupled)
        for r in range(R):
            count, start = int(out.counts[r]), int(at[r])
            if start + count <= alone.shape[1]:
                assert out.tokens[r, :count].tolist() == alone[r, start : start + count].tolist()
        accepted += int(out.accepted.sum())
        at, anchors = at + out.counts, out.last
    assert accepted > R, "no draft was right"


def test_a_request_without_drafts_is_sampled():
    arguments, _, _ = make(20, 60, 3)
    logits, drafts, record, _, _, *s = arguments
    rows, at = logits[:20].contiguous(), torch.arange(20)
    expected = dspark_kernels.sample(rows, s[0], s[1], s[2], s[3], at + 1)
    cu = torch.arange(21, dtype=torch.int32)
    with_records = verify(rows, drafts, record, cu, at, *s)
    without = verify(rows, None, None, cu, at, *s)
    for out in (with_records, without):
        assert_bitwise(out.tokens[:, 0], expected[0])
        assert_bitwise(out.logprobs[:, 0].contiguous(), expected[1])
    assert without.tokens.shape == (20, 1)


def test_a_request_alone():
    """Requests do not depend on the batch, nor on where their records stand."""
    (logits, drafts, record, cu, positions, *s), coupled, lengths = make(24, 300, 5, seed=3)
    together = verify(logits, drafts, record, cu, positions, *s, coupled=coupled)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([torch.arange(int(cu[r]), int(cu[r + 1])) for r in order.tolist()])
    counts = (lengths + 1)[order]
    moved_cu = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    options = [t[order] for t in s]
    moved = verify(logits[rows], drafts, record, moved_cu, positions[rows], *options, slots=order.int(),
                   coupled=coupled[order])  # fmt: skip
    for a, b in zip(moved, together, strict=True):
        assert_bitwise(a, b[order])
    for r in (0, 7, 23):
        part = slice(int(cu[r]), int(cu[r + 1]))
        single = verify(logits[part], drafts, record, torch.tensor([0, part.stop - part.start], dtype=torch.int32),
                        positions[part], *(t[r : r + 1] for t in s), slots=torch.tensor([r], dtype=torch.int32),
                        coupled=coupled[r : r + 1])  # fmt: skip
        for a, b in zip(single, together, strict=True):
            assert_bitwise(a, b[r : r + 1])


def test_threads_and_repetition():
    for R, V, G in ((3, 129_280, 1), (40, 500, 5)):
        arguments, coupled, _ = make(R, V, G)
        assert_thread_invariant(lambda a=arguments, c=coupled: verify(*a, coupled=c))
        assert_repeatable(lambda a=arguments, c=coupled: verify(*a, coupled=c), times=3)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_rows_without_a_distribution_fail_their_request_where_they_are_reached(backend):
    V, G = 40, 2
    target = torch.zeros(V, V)
    target.fill_diagonal_(50.0)  # every token repeats itself, and so do the drafts
    s, anchors, at = settings(6), torch.arange(6), torch.zeros(6, dtype=torch.int64)
    drafts, record = draft(target, anchors, at, G, s)
    logits, cu, place, owner = target_rows(target, anchors, record.tokens, torch.full((6,), G))
    logits[0] = NAN  # request 0, place 0
    logits[4, 7] = INF  # request 1, place 1
    logits[8] = -INF  # request 2, place 2
    record.tokens[3, 0] = 30  # request 3 is rejected at place 0, so that its place 1 does not matter
    record.logprobs[3, 0] = 0.0
    logits[10] = NAN
    with kernel_core.using(backend):
        out = verify(logits, drafts, record, cu, at[owner] + place, *s)
    assert out.failed.tolist() == [True, True, True, False, False, False]
    assert out.counts.tolist() == [0, 1, 2, 1, 3, 3] and out.accepted.tolist() == [0, 1, 2, 0, 2, 2]
    assert out.last.tolist() == [-1, 1, 2, 3, 4, 5]
    assert out.tokens[0].tolist() == [-1] * 3 and out.tokens[1].tolist() == [1, -1, -1]
    assert bool(out.logprobs[0].isnan().all()) and out.tokens[3].tolist() == [3, -1, -1]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_drafts_that_are_none_are_redrawn_from_the_target(backend):
    """-1 (no distribution there) and ids outside the vocabulary: as many tokens as ever, never more."""
    V, R, G = 9, 30, 2
    s, zeros = settings(R), torch.zeros(R, dtype=torch.int64)
    record = new_proposals(R, G)
    record.tokens[10:20] = V
    record.logprobs[10:20] = 0.0
    logits, cu, place, _ = target_rows(torch.randn(V, V), zeros, zeros.view(R, 1).expand(R, G), torch.full((R,), G))
    with kernel_core.using(backend):
        out = verify(logits, torch.full((R, G, V), NAN), record, cu, place, *s)
    assert out.counts.tolist() == [1] * R and not bool(out.failed.any())
    u = dspark_kernels.uniform(s.seeds, torch.ones(R, dtype=torch.int64), 3)
    assert_bitwise(out.tokens[:, 0], reference_verify.inverse(logits[::3].double().softmax(-1), u))


def test_equal_distributions_accept_everything():
    """p = q: no residual at all."""
    V, R, G = 50, 200, 3
    table = torch.randn(V, V)
    zeros = torch.zeros(R, dtype=torch.int64)
    for temperature, top_p, top_k in ((1.0, 1.0, 0), (0.6, 0.8, 0), (1.2, 1.0, 4)):
        s = settings(R, temperature, top_p, top_k)
        out = step(table, table, zeros, zeros, torch.full((R,), G), G, s)
        assert out.accepted.tolist() == [G] * R


def test_a_draft_that_the_target_excludes_is_always_rejected():
    V, R = 6, 300
    target = torch.zeros(V, V)
    target[:, 3] = -INF
    drafter = torch.full((V, V), -INF)
    drafter[:, 3] = 0.0
    s, zeros = settings(R), torch.zeros(R, dtype=torch.int64)
    out = step(target, drafter, zeros, zeros, torch.ones(R, dtype=torch.int64), 1, s)
    assert int(out.accepted.sum()) == 0 and set(out.last.tolist()) == {0, 1, 2, 4, 5}


def test_padding_requests_emit_nothing():
    (logits, drafts, record, cu, positions, *s), coupled, _ = make(8, 30, 2)
    padded = torch.cat([cu, cu[-1:].expand(3)])
    more = torch.cat([logits, torch.full((5, 30), NAN)]), torch.cat([positions, torch.zeros(5, dtype=torch.int64)])
    options = [torch.cat([t, t[:3]]) for t in s]
    slots = torch.tensor([*range(8), -1, -1, -1], dtype=torch.int32)
    out = verify(more[0], drafts, record, padded, more[1], *options, slots=slots,
                 coupled=torch.cat([coupled, coupled[:3]]))  # fmt: skip
    plain = verify(logits, drafts, record, cu, positions, *s, coupled=coupled)
    for a, b in zip(out, plain, strict=True):
        assert_bitwise(a[:8].contiguous(), b)
    assert out.counts[8:].tolist() == [0] * 3 and out.last[8:].tolist() == [-1] * 3 and not bool(out.failed[8:].any())


def test_results_go_to_the_room_that_is_given():
    arguments, coupled, _ = make(9, 30, 2)
    room = new_verified(9, 2)
    out = verify(*arguments, coupled=coupled, out=room)
    assert all(a is b for a, b in zip(out, room, strict=True))
    for a, b in zip(out, verify(*arguments, coupled=coupled), strict=True):
        assert_bitwise(a, b)


def test_dispatcher():
    arguments, coupled, _ = make(9, 30, 2)
    logits, drafts, record, *rest = arguments
    direct = verify(*arguments, coupled=coupled)
    for a, b in zip(direct, torch.ops.dspark_kernels.verify(logits, drafts, list(record), *rest, coupled=coupled),
                    strict=True):  # fmt: skip
        assert_bitwise(a, b)
    for a, b in zip(verify(logits, None, None, torch.arange(10, dtype=torch.int32), *rest[1:]),
                    torch.ops.dspark_kernels.verify(logits, None, None, torch.arange(10, dtype=torch.int32), *rest[1:]),
                    strict=True):  # fmt: skip
        assert_bitwise(a, b)


def test_bad_arguments_are_named_before_anything_is_written():
    (logits, drafts, record, cu, positions, *s), _, _ = make(4, 30, 2)
    room = new_verified(4, 2)
    for tensor in room:
        tensor.fill_(1)
    names = ("logits", "draft_logits", "proposals", "cu_rows", "positions", "temperature", "top_p", "top_k", "seeds")
    good = dict(zip(names, (logits, drafts, record, cu, positions, *s), strict=True)) | {"out": room}
    i32 = torch.int32
    cases = [
        ("logits", logits.double()), ("draft_logits", drafts[:, :, :29]), ("draft_logits", drafts.double()),
        ("proposals", None), ("proposals", columns(record, 1)._replace(cut=record.cut)),
        ("cu_rows", cu + 1), ("cu_rows", cu.flip(0)), ("cu_rows", torch.tensor([0, 4, 5, 6, 7], dtype=i32)),
        ("cu_rows", torch.tensor([0, 3, 6, 9, 90], dtype=i32)), ("positions", positions[1:]),
        ("temperature", s[0][1:]), ("temperature", -1 - s[0]), ("top_p", s[1] * 0), ("top_k", -1 - s[2]),
        ("seeds", s[3].int()), ("slots", torch.tensor([0, 1, 2], dtype=i32)),
        ("slots", torch.full((4,), 4, dtype=i32)), ("coupled", torch.zeros(4)), ("out", new_verified(4, 1)),
    ]  # fmt: skip
    for name, value in cases:
        given = good | {name: value}
        if name == "slots":
            given["cu_rows"] = torch.tensor([0, 2, 2, 2, 2], dtype=i32)
        for backend in ("native", "reference"):
            with kernel_core.using(backend), pytest.raises(ValueError, match=f"{name}.*got .*allowed"):
                verify(**given)
    assert all(bool((t == 1).all()) for t in room)


def test_no_top_p_is_one_for_all():
    """Here and for the reference; temperatures above 1 are not taken for a bad top_p."""
    (*given, _, _, seeds), coupled, _ = make(40, 257, 5)
    given[5][2] = 1.25
    expected = verify(*given, torch.ones(40), None, seeds, coupled=coupled)
    for name, a, b in zip(Verified._fields, verify(*given, None, None, seeds, coupled=coupled), expected, strict=True):
        assert_bitwise(a, b, name=name)
    through_torch = torch.ops.dspark_kernels.verify(
        *given[:2], list(given[2]), *given[3:], None, None, seeds, coupled=coupled
    )
    for name, a, b in zip(Verified._fields, through_torch, expected, strict=True):
        assert_bitwise(a, b, name=name)
    with kernel_core.using("reference"):
        assert_bitwise(verify(*given, None, None, seeds, coupled=coupled).tokens, expected.tokens)
    with pytest.raises(ValueError, match="temperature"):
        verify(*given[:5], given[5].double(), None, None, seeds)
