"""TileLang's verification and draft sampling with filters: their CUDA source on host threads against the ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark_kernels import reference, reference_verify, verify
from dspark_kernels.tile import lower
from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.child import load_file

pytest.importorskip("tilelang", reason="TileLang is not installed: its programs are neither lowered nor compiled")
HERE = Path(__file__).parent
HOST = load_file(HERE / "tile_threads.py")
MAKE_STEP = load_file(HERE / "test_verify.py").make
THREADS = 32  # of a block; the programs' own 256 are as many threads of the host


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not (HOST.THREADS / "threads.hpp").is_file():
        pytest.skip("needs the checkout: a block on host threads stands in mla_fp4's tests")
    return tmp_path_factory.mktemp("tile")


def statistics(logits, factor):
    """What `stats_program` gives: largest logits and sums of pieces."""
    from dspark_kernels.tile.verify import PIECE

    parts = logits.split(PIECE, dim=1)
    top = torch.stack([p.amax(1) for p in parts], 1)
    warm = torch.stack([((p - p.amax(1, True)) * factor[:, None]).exp().sum(1) for p in parts], 1)
    return top.contiguous(), warm.nan_to_num().contiguous()


def cuts(folder, logits, temperature, top_p, top_k):
    """Columns of `cut_program` of rows: factor, value, last, row_top, row_mass."""
    from dspark_kernels.tile import cut, run_filtered

    N, V = logits.shape
    factor, top_p, top_k = run_filtered.row_settings(temperature, top_p, top_k)
    top, warm = statistics(logits, factor)
    value, row_top, row_mass = (torch.full((N,), 7.0) for _ in range(3))
    last = torch.full((N,), -7, dtype=torch.int32)
    program = HOST.Program(lower.lower(cut.cut_program(N, V, THREADS), "sm90"), folder)
    program(N, logits=logits, factor=factor, top_p=top_p, top_k=top_k, top=top, warm=warm, value=value, last=last,
            row_top=row_top, row_mass=row_mass)  # fmt: skip
    return factor, value, last, row_top, row_mass


@pytest.mark.parametrize(("V", "kind"), [(5, "plain"), (300, "rounded"), (300, "masked"), (9000, "plain")])
def test_cuts_keep_what_the_reference_keeps(folder, make_rows, V, kind):
    logits, temperature, top_p, top_k, *_ = make_rows(16, V)
    if kind == "rounded":
        logits = logits.round()  # many equals, among them -0 and 0
    elif kind == "masked":
        logits[:, 2 : V - 3] = -torch.inf
    factor, value, last, row_top, row_mass = cuts(folder, logits, temperature, top_p, top_k)
    ids = torch.arange(V)
    kept = (logits > value[:, None]) | ((logits == value[:, None]) & (ids <= last[:, None]))
    expected = reference.distribution(logits, temperature, top_p, top_k)
    assert_bitwise(kept & logits.isfinite(), expected > 0)
    weights = ((logits - row_top[:, None]) * factor[:, None]).double().exp() * kept
    assert_close(weights / row_mass.double()[:, None], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("V", "G", "R"), [(33, 3, 24), (5000, 2, 6)])
def test_verification_is_the_ops(folder, V, G, R):
    from dspark_kernels.tile import filtered, run_filtered

    (logits, drafts, record, cu, positions, temperature, top_p, top_k, seeds), _, lengths = MAKE_STEP(
        R, V, G, 2, like=0.9
    )
    record.tokens[1, 0] = -1  # a draft without a distribution, redrawn from p
    record.mass[1, 0] = torch.nan
    N = len(logits)
    owner = torch.repeat_interleave(torch.arange(R), lengths + 1)
    given = (logits, drafts, record, cu, positions, temperature, top_p, top_k, seeds)
    expected = verify(*given)
    columns = cuts(folder, logits, *(t[owner].contiguous() for t in (temperature, top_p, top_k)))
    names = ("factor", "value", "last", "row_top", "row_mass")
    rows = dict(zip(names, columns, strict=True))
    u = run_filtered.draws(seeds[owner], positions + 1)
    slots = torch.arange(R, dtype=torch.int32)
    accepted, tokens = torch.full((R,), -7, dtype=torch.int32), torch.full((R,), -7)
    decide = HOST.Program(lower.lower(filtered.decide_program(R, G, N, V, R, 8), "sm90"), folder)
    decide(-(-R // 8), logits=logits, cu_rows=cu, slots=slots, drafts=record.tokens, log_q=record.logprobs,
           u=u[0], accepted=accepted, **rows)  # fmt: skip
    assert_bitwise(accepted, expected.accepted)
    assert 0 < int(accepted.sum()) < int(lengths.sum()), "too uniform to show anything"
    value, last = run_filtered.unpack_cut(record.cut)
    token = HOST.Program(lower.lower(filtered.token_program(R, G, N, V, R, THREADS), "sm90"), folder)
    token(R, logits=logits, draft_logits=drafts, cu_rows=cu, slots=slots, accepted=accepted, u=u[1], tokens=tokens,
          draft_top=record.top, draft_factor=record.factor, draft_mass=record.mass.float(), draft_value=value,
          draft_last=last, **rows)  # fmt: skip
    assert_bitwise(tokens, expected.last)


def test_drafts_are_the_ops_and_nothing_left_is_drawn_from_the_target(folder, make_rows):
    """Rows behind no draft draw as `draft_step` does; and where p - q is 0 everywhere, as from p."""
    from dspark_kernels import draft_step, new_proposals
    from dspark_kernels.tile import filtered, run_filtered

    B, V = 8, 4200
    logits, temperature, top_p, top_k, seeds, positions = make_rows(B, V)
    room = new_proposals(B, 1)
    expected = draft_step(logits[:, None].clone(), 0, None, temperature, top_p, top_k, seeds, positions, room)
    columns = cuts(folder, logits, temperature, top_p, top_k)
    rows = dict(zip(("factor", "value", "last", "row_top", "row_mass"), columns, strict=True))
    u = reference.uniform(seeds, positions + 1, 1).float().unsqueeze(1).expand(B, 2).contiguous()
    program = HOST.Program(lower.lower(filtered.token_program(B, 1, B, V, B, THREADS), "sm90"), folder)
    factor, value, last, top, mass = (t.unsqueeze(1).contiguous() for t in columns)
    given = {"logits": logits, "draft_logits": logits[:, None].contiguous(), "draft_top": top, "draft_factor": factor,
             "draft_mass": mass, "draft_value": value, "draft_last": last, "u": u, **rows,
             "accepted": torch.zeros(B, dtype=torch.int32), "slots": torch.arange(B, dtype=torch.int32)}  # fmt: skip
    tokens = torch.full((B,), -7)
    program(B, cu_rows=torch.arange(B + 1, dtype=torch.int32), tokens=tokens, **given)
    assert_bitwise(tokens, expected)
    # as if the last row had a rejected draft from its own distribution
    tokens = torch.full((B,), -7)
    cu_rows = torch.cat([torch.arange(B), torch.tensor([B + 1])]).int()  # one row more for the last
    program(B, cu_rows=cu_rows, tokens=tokens, **given)
    assert_bitwise(tokens, expected)
    value, last = run_filtered.unpack_cut(room.cut[:, 0])
    kept = (logits > value[:, None]) | ((logits == value[:, None]) & (torch.arange(V) <= last[:, None]))
    packed, bound = run_filtered.unpack_cut(run_filtered.pack_cut(rows["value"], rows["last"]))
    mine = (logits > packed[:, None]) | ((logits == packed[:, None]) & (torch.arange(V) <= bound[:, None]))
    assert_bitwise(mine, kept)


def test_cuts_of_records_come_back():
    logits = torch.tensor([[-1.5, 2.0, 0.0, -0.0, 2.0, -3.0]])
    keys = reference_verify.order_keys(logits)[0]
    from dspark_kernels.tile import run_filtered

    value, last = run_filtered.unpack_cut(torch.cat([keys, torch.zeros(1, dtype=torch.int64)]))
    assert value.tolist() == [-1.5, 2.0, 0.0, 0.0, 2.0, -3.0, -torch.inf] and last[:6].tolist() == list(range(6))
    assert int(last[6]) == 2**31 - 1
    assert_bitwise(run_filtered.pack_cut(value[:6], last[:6]), keys)
