"""The experts for many tokens on an NVIDIA GPU: W4A8 against float32 references, and what no bit may depend on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernel_core import formats
from kernel_core.testing import assert_bitwise
from kernel_core.testing.child import load_file
from mega_moe.cuda import experts as fused
from mega_moe.cuda import layout, layout_fp8, prefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CASES = load_file(Path(__file__).parents[1] / "expert_cases.py")
sort_rows, random_ids, quantized = CASES.sort_rows, CASES.random_ids, CASES.quantized
LIMIT = 10.0
VARIANTS = list(itertools.product(prefill.TILES, (False, True)))


class Case:
    def __init__(self, weights, ids, *, d=1024, inter=512, experts=6, positive=False, fp8=True):
        self.ids, self.experts = ids.cuda(), experts
        tokens, slots = ids.shape
        self.x = weights.normal(tokens, d).bfloat16().cuda()
        self.gains = torch.rand(tokens, slots).cuda()
        w13 = [t.view(experts, 2 * inter, -1).cuda() for t in weights.mxfp4(experts * 2 * inter, d)]
        w2 = [t.view(experts, d, -1).cuda() for t in weights.mxfp4(experts * d, inter)]
        if positive:
            self.x.abs_()
            w13[0] &= 0x77
        self.raw = (*w13, *w2)
        self.packed = (layout_fp8 if fp8 else layout).pack_experts(*self.raw)
        self.offsets, self.rows = sort_rows(self.ids, experts)

    def expected(self):
        w13, s13, w2, s2 = self.raw
        parts = self.x.new_zeros(*self.ids.shape, self.x.shape[1], dtype=torch.float32)
        rows = quantized(self.x.float())
        for expert in range(self.experts):
            token, slot = torch.where(self.ids == expert)
            if len(token):
                gate, up = F.linear(rows[token], formats.dequantize_mxfp4(w13[expert], s13[expert])).chunk(2, dim=-1)
                hidden = F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT) * self.gains[token, slot][:, None]
                parts[token, slot] = F.linear(quantized(hidden), formats.dequantize_mxfp4(w2[expert], s2[expert]))
        return parts.sum(1)

    def run(self, *, as_float=True, **options):
        dtype = torch.float32 if as_float else torch.bfloat16
        guarded = torch.full((len(self.x) + 2, self.x.shape[1]), 77.0, device="cuda", dtype=dtype)
        out = guarded[1:-1]
        out[:] = torch.nan
        x = self.x.to(dtype)
        prefill.experts(x, self.ids, self.gains, self.packed, self.offsets, self.rows, limit=LIMIT, out=out, **options)
        assert (guarded[0] == 77).all() and (guarded[-1] == 77).all()
        return out.clone()


def close(got, case):
    """Hidden values may fall to the next E4M3 code."""
    want = case.expected()
    assert (got.float() - want).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize(("tile", "expanded"), VARIANTS)
@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 128, 129, 500])
def test_against_the_reference(weights, tokens, tile, expanded):
    case = Case(weights, random_ids(tokens, 2, 6))
    got = case.run(tile=tile, expanded=expanded)
    if tokens:
        close(got, case)


@pytest.mark.parametrize(("tile", "expanded"), VARIANTS)
def test_no_bit_depends_on_tiles_or_ctas_or_launches(weights, tile, expanded):
    case = Case(weights, random_ids(300, 3, 6), inter=768)
    whole = case.run()
    close(whole, case)
    for ctas in (132, 7, 1):
        assert_bitwise(case.run(tile=tile, expanded=expanded, ctas=ctas), whole, name=f"{ctas} CTAs")
    for lag in (1, 2):
        assert_bitwise(case.run(tile=tile, expanded=expanded, lag=lag), whole, name=f"lag {lag}")
    buffers = prefill.new_workspace(case.packed, 300, 3, case.x.device, parts_are_float=True, expanded=expanded)
    steps = (prefill.EXPAND,) if expanded else ()
    for step in (*steps, prefill.ROWS, prefill.FIRST, prefill.SECOND, prefill.SUM):
        got = case.run(tile=tile, expanded=expanded, steps=step, buffers=buffers)
    assert_bitwise(got, whole, name="one launch at a time")


@pytest.mark.parametrize(("tile", "expanded"), VARIANTS)
def test_full_size_repeats(weights, tile, expanded):
    case = Case(weights, random_ids(400, 3, 7), d=5120, inter=2304, experts=7)
    whole = case.run(tile=tile, expanded=expanded)
    close(whole, case)
    for _ in range(20):
        assert_bitwise(case.run(tile=tile, expanded=expanded), whole)


@pytest.mark.parametrize("tile", prefill.TILES)
def test_one_hot_expert_empty_ones_and_foreign_ids(weights, tile):
    ids = torch.full((200, 2), -1, dtype=torch.int32)
    ids[:, 0] = 2
    ids[3, 1], ids[4, 1], ids[5, 0] = 0, 6, -1
    case = Case(weights, ids)
    got = case.run(tile=tile)
    close(got, case)
    assert (got[5] == 0).all()


def test_nobody_at_home(weights):
    assert (Case(weights, torch.full((4, 2), -1, dtype=torch.int32)).run() == 0).all()


def test_a_row_depends_on_itself(weights):
    case = Case(weights, random_ids(200, 2, 6))
    whole = case.run()
    for row in (0, 117, 199):
        alone = Case.__new__(Case)
        alone.__dict__.update(case.__dict__)
        alone.x, alone.ids, alone.gains = (t[row : row + 1].contiguous() for t in (case.x, case.ids, case.gains))
        alone.offsets, alone.rows = sort_rows(alone.ids, case.experts)
        assert_bitwise(alone.run(), whole[row : row + 1], name=f"row {row}")


def test_zeros_and_nan_are_a_tokens_own(weights):
    case = Case(weights, random_ids(90, 2, 6))
    clean = case.run()
    case.x[2], case.x[4] = 0, torch.nan
    got = case.run()
    assert (got[2] == 0).all() and got[4].isnan().all()
    keep = (torch.arange(90) != 2) & (torch.arange(90) != 4)
    assert_bitwise(got[keep], clean[keep])


@pytest.mark.parametrize("tile", prefill.TILES)
@pytest.mark.parametrize("tokens", [1, 64, 65, 200, 700])
def test_bfloat16_activations_give_the_bits_of_the_fused_kernel(weights, tokens, tile):
    case = Case(weights, random_ids(tokens, 3, 7), d=1024, inter=768, experts=7, fp8=False)
    x = case.x.float()
    arguments = (x, case.ids, case.gains, case.packed, case.offsets, case.rows)
    want = fused.experts(*arguments, limit=LIMIT)
    for ctas in (132, 7):
        assert_bitwise(case.run(tile=tile, ctas=ctas), want, name=f"{ctas} CTAs")
    assert_bitwise(case.run(tile=tile, as_float=False), want.bfloat16(), name="bfloat16")


def test_bfloat16_full_size_repeats(weights):
    case = Case(weights, random_ids(400, 3, 7), d=5120, inter=2304, experts=7, fp8=False)
    x = case.x.float()
    want = fused.experts(x, case.ids, case.gains, case.packed, case.offsets, case.rows, limit=LIMIT)
    for turn in range(20):
        assert_bitwise(case.run(tile=prefill.TILES[turn % 2]), want)


def test_types_of_results_and_parts(weights):
    case = Case(weights, random_ids(70, 3, 6))
    whole = case.run()
    assert_bitwise(case.run(as_float=False, parts_are_float=True), whole.bfloat16())
    close(case.run(as_float=False), case)
    one = Case(weights, random_ids(70, 1, 6))
    assert_bitwise(one.run(as_float=False), one.run(as_float=False, parts_are_float=True))


def test_sums_of_one_sign(weights):
    """Long sums of the same sign: what the tensor unit drops shows first here."""
    case = Case(weights, random_ids(150, 1, 2), d=5120, experts=2, positive=True)
    close(case.run(), case)


def test_in_a_graph(weights):
    case = Case(weights, random_ids(120, 2, 6))
    wanted = case.run()
    x, out = case.x.float(), torch.empty_like(wanted)
    arguments = (x, case.ids, case.gains, case.packed, case.offsets, case.rows)
    buffers = prefill.new_workspace(case.packed, 120, 2, x.device, parts_are_float=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.experts(*arguments, limit=LIMIT, out=out, buffers=buffers)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert_bitwise(out, wanted)


def test_refuses_wrong_sizes(weights):
    case = Case(weights, random_ids(2, 2, 6))
    with pytest.raises(ValueError, match="tile"):
        case.run(tile=9)
