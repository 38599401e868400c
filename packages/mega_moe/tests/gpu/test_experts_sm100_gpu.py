"""The SM100 expert kernels on such a device: references, ragged and empty experts, and what a row may not depend on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_core import formats
from kernel_core.testing import assert_bitwise
from mega_moe.cuda import experts_sm100 as kernels
from mega_moe.cuda.route import permute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (10, 0), reason="needs an SM100 GPU"
    ),
]
LIMIT, EXPERTS = 10.0, 6


def mxfp8(x):
    """E4M3 with UE8M0 scales for 32 values, and back."""
    groups = x.double().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def one(x, w13, w2, gain):
    gate, up = (mxfp8(x) @ w13.double().T).chunk(2, dim=-1)
    h = F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT) * gain.unsqueeze(-1)
    return mxfp8(h) @ w2.double().T


class Case:
    def __init__(self, weights, ids, *, d=1024, inter=512, shared=False):
        self.ids = ids.int().cuda()
        self.x, self.gains = weights.normal(len(ids), d).cuda(), torch.rand(ids.shape).cuda()
        w13 = [t.view(EXPERTS, 2 * inter, -1).cuda() for t in weights.mxfp4(EXPERTS * 2 * inter, d)]
        w2 = [t.view(EXPERTS, d, -1).cuda() for t in weights.mxfp4(EXPERTS * d, inter)]
        self.shared = weights.shared(d, inter) if shared else None
        if self.shared is not None:
            self.shared = type(self.shared)(*(t.cuda() for t in vars(self.shared).values()))
        self.raw = (*w13, *w2)
        self.packed = kernels.pack_experts(*self.raw, self.shared)

    def expected(self):
        w13, s13, w2, s2 = self.raw
        out = torch.zeros_like(self.x, dtype=torch.float64)
        for e in range(EXPERTS):
            token, slot = torch.where(self.ids == e)
            full = formats.dequantize_mxfp4(w13[e], s13[e]), formats.dequantize_mxfp4(w2[e], s2[e])
            out.index_add_(0, token, one(self.x[token], *full, self.gains[token, slot].double()))
        if self.shared is not None:
            s = self.shared
            full = formats.dequantize_fp8_block(s.w13, s.s13), formats.dequantize_fp8_block(s.w2, s.s2)
            out += one(self.x, *full, out.new_ones(len(out)))
        return out

    def run(self, rows=slice(None), **options):
        x, ids, gains = self.x[rows], self.ids[rows], self.gains[rows]
        guarded = torch.full((len(x) + 2, x.shape[1]), 77.0, device="cuda")
        guarded[1:-1] = torch.nan
        order = permute(ids, EXPERTS, shared=self.shared is not None)
        kernels.experts(x, ids, gains, self.packed, *order, limit=LIMIT, out=guarded[1:-1], **options)
        assert (guarded[0] == 77).all() and (guarded[-1] == 77).all()
        return guarded[1:-1].clone()


def check(got, want):
    # A hidden value beside the middle of two codes may go either way.
    assert (got.double() - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize("tile", kernels.SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 31, 33, 300])
def test_against_the_reference(weights, tile, tokens):
    ids = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(tokens)])
    ids[ids == 4] = -1
    case = Case(weights, ids)
    check(case.run(tile=tile), case.expected())


@pytest.mark.parametrize("tile", kernels.SHAPES)
def test_shared_and_one_hot_expert(weights, tile):
    case = Case(weights, torch.full((130, 1), 3), shared=True)
    check(case.run(tile=tile), case.expected())


def test_rows_alone_tiles_grids_and_repeats(weights):
    ids = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(200)])
    case = Case(weights, ids, shared=True)
    first = case.run(tile=(16, 1))
    for tile in kernels.SHAPES:
        for grid in (2, 7, 148):
            assert_bitwise(case.run(tile=tile, grid=grid), first)
    for _ in range(20):
        assert_bitwise(case.run(tile=(64, 2)), first)
    for row in (0, 77, 199):
        assert_bitwise(case.run(slice(row, row + 1), tile=(64, 2)), first[row : row + 1])


def test_model_shape(weights):
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(64)])
    case = Case(weights, ids, d=5120, inter=2304)
    check(case.run(), case.expected())
    case.x.abs_()  # sums of one sign over all of K
    check(case.run(), case.expected())


def test_nobody(weights):
    assert (Case(weights, torch.full((5, 2), -1)).run() == 0).all()
