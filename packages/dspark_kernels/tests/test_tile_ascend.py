"""Filters, verification and draft sampling for Ascend: their AscendC source on host threads against the ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark_kernels import draft_step, new_proposals, reference, verify
from dspark_kernels.tile import lower
from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.child import load_file

pytest.importorskip("tilelang", reason="TileLang is not installed: its programs are neither lowered nor compiled")
HERE = Path(__file__).parent
HOST = load_file(HERE / "ascend_regions.py")
MAKE_STEP = load_file(HERE / "test_verify.py").make
THREADS = 16  # of a region; the programs' own 128 are as many threads of the host


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not (HOST.THREADS / "threads.hpp").is_file():
        pytest.skip("needs the checkout: threads of a region stand in mla_fp4's tests")
    return tmp_path_factory.mktemp("ascend")


def cuts(folder, logits, temperature, top_p, top_k):
    """Results of `cut_program` by name, with the rows' factor."""
    from dspark_kernels.tile import cut_asc, run_filtered

    N, V = logits.shape
    factor, top_p, top_k = run_filtered.row_settings(temperature, top_p, top_k)
    out = {name: torch.full((N, 8), 7.0) for name in ("value", "row_top", "row_mass")}
    out["last"] = torch.full((N, 8), -7, dtype=torch.int32)
    program = HOST.Program(lower.lower_ascend(cut_asc.cut_program(N, V, THREADS)), folder)
    program(cut_asc.CORES, logits=logits, factor=factor, top_p=top_p, top_k=top_k, **out)
    return out | {"factor": factor}


def test_cuts_keep_what_the_reference_keeps(folder, make_rows):
    """More rows than cores, many equal logits."""
    V = 40
    logits, temperature, top_p, top_k, *_ = make_rows(66, V)
    logits = logits.round()
    found = cuts(folder, logits, temperature, top_p, top_k)
    value, last, top, mass = (found[name][:, :1] for name in ("value", "last", "row_top", "row_mass"))
    kept = (logits > value) | ((logits == value) & (torch.arange(V) <= last))
    expected = reference.distribution(logits, temperature, top_p, top_k)
    assert_bitwise(kept, expected > 0)
    weights = ((logits - top) * found["factor"][:, None]).double().exp() * kept
    assert_close(weights / mass.double(), expected, atol=1e-6, rtol=1e-5)


def nothing(S, G, V):
    """Records and drafter's logits of no draft."""
    columns = {f"draft_{name}": torch.zeros(S, G) for name in ("top", "factor", "mass", "value")}
    whole = {name: torch.zeros(S, G, dtype=torch.int32) for name in ("draft_last", "drafts")}
    return columns | whole | {"log_q": torch.zeros(S, G), "draft_logits": torch.zeros(S, G, V)}


def test_verification_is_the_ops(folder):
    from dspark_kernels.tile import cut_asc, run_filtered, verify_asc

    R, V, G = 66, 50, 2
    (logits, drafts, record, cu, positions, temperature, top_p, top_k, seeds), _, lengths = MAKE_STEP(
        R, V, G, 2, like=0.8
    )
    record.tokens[1, 0] = -1  # a draft without a distribution, redrawn from p
    record.mass[1, 0] = torch.nan
    expected = verify(logits, drafts, record, cu, positions, temperature, top_p, top_k, seeds)
    owner = torch.repeat_interleave(torch.arange(R), lengths + 1)
    rows = cuts(folder, logits, *(t[owner].contiguous() for t in (temperature, top_p, top_k)))
    accept, pair = run_filtered.draws(seeds[owner], positions + 1)
    value, last = run_filtered.unpack_cut(record.cut)
    results = torch.full((R, 8), -7, dtype=torch.int32)
    source = lower.lower_ascend(verify_asc.verify_program(R, G, len(logits), V, R, THREADS))
    HOST.Program(source, folder)(
        cut_asc.CORES, logits=logits, draft_logits=drafts, drafts=record.tokens.int(), log_q=record.logprobs,
        draft_top=record.top, draft_factor=record.factor, draft_mass=record.mass.float(), draft_value=value,
        draft_last=last, cu_rows=cu, slots=torch.arange(R, dtype=torch.int32),
        u=torch.cat([accept[:, None], pair], 1), results=results, **rows,
    )  # fmt: skip
    assert 10 < int(expected.accepted.sum()) < int(lengths.sum()) - 10, "too uniform to show anything"
    assert_bitwise(results[:, 0].contiguous(), expected.accepted)
    assert_bitwise(results[:, 1].long(), expected.last)


def test_drafts_are_the_ops(folder, make_rows):
    """A row for a request and no draft before it: the program draws as `draft_step` does."""
    from dspark_kernels.tile import cut_asc, verify_asc

    B, V = 12, 4200
    logits, temperature, top_p, top_k, seeds, positions = make_rows(B, V)
    expected = draft_step(
        logits[:, None].clone(), 0, None, temperature, top_p, top_k, seeds, positions, new_proposals(B, 1)
    )
    rows = cuts(folder, logits, temperature, top_p, top_k)
    u = reference.uniform(seeds, positions + 1, 1).float().unsqueeze(1).expand(B, 3).contiguous()
    results = torch.full((B, 8), -7, dtype=torch.int32)
    cu, slots = torch.arange(B + 1, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    source = lower.lower_ascend(verify_asc.verify_program(B, 1, B, V, 1, THREADS))
    given = nothing(1, 1, V) | rows
    HOST.Program(source, folder)(cut_asc.CORES, logits=logits, cu_rows=cu, slots=slots, u=u, results=results, **given)
    assert_bitwise(results[:, 1].long(), expected)


def test_a_program_lowers_to_the_same_text_every_time():
    from dspark_kernels.tile import verify_asc

    first, second = (lower.lower_ascend(verify_asc.verify_program(128, 5, 768, 129_280, 128)) for _ in range(2))
    assert first == second and first.count("__simt_vf__") == 6


def test_sizes_that_do_not_fit_are_refused():
    from dspark_kernels.tile import cut_asc, verify_asc

    with pytest.raises(ValueError, match="got 4, 9"):
        verify_asc.verify_program(4, 9, 40, 100, 4)
    with pytest.raises(ValueError, match="got 0, 5"):
        cut_asc.cut_program(0, 5)
    with pytest.raises(ValueError, match="threads: got 8"):
        cut_asc.cut_program(4, 5, threads=8)
