"""The expert kernels on an NVIDIA GPU against float32 references, and what a row may never depend on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernel_core import formats
from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.child import load_file
from mega_moe.cuda import experts as kernels
from mega_moe.cuda import layout, layout_fp8
from mega_moe.cuda import ranks as rank_tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CASES = load_file(Path(__file__).parents[1] / "expert_cases.py")
sort_rows, random_ids, quantized = CASES.sort_rows, CASES.random_ids, CASES.quantized
LIMIT = 10.0


class Case:
    def __init__(self, weights, ids, *, d=1024, inter=512, experts=6, shared=True):
        self.ids, self.experts = ids.cuda(), experts
        tokens, slots = ids.shape
        self.x = weights.normal(tokens, d).bfloat16().cuda()
        self.gains = torch.rand(tokens, slots).cuda()
        w13 = [t.view(experts, 2 * inter, -1).cuda() for t in weights.mxfp4(experts * 2 * inter, d)]
        w2 = [t.view(experts, d, -1).cuda() for t in weights.mxfp4(experts * d, inter)]
        shared_weights = weights.shared(d, inter) if shared else None
        if shared_weights is not None:
            shared_weights = type(shared_weights)(*(t.cuda() for t in vars(shared_weights).values()))
        self.raw, self.shared = (*w13, *w2), shared_weights
        self.packed = layout.pack_experts(*w13, *w2, shared_weights)
        self.offsets, self.rows = sort_rows(self.ids, experts)

    def expected(self):
        """With the kernel's roundings: x and hidden rows are bfloat16, products and sums float32."""
        w13, s13, w2, s2 = self.raw
        out = torch.zeros_like(self.x, dtype=torch.float32)
        parts = out.new_zeros(*self.ids.shape, out.shape[1])
        for expert in range(self.experts):
            token, slot = torch.where(self.ids == expert)
            if len(token):
                full = (
                    formats.dequantize_mxfp4(w13[expert], s13[expert]),
                    formats.dequantize_mxfp4(w2[expert], s2[expert]),
                )
                parts[token, slot] = one(self.x[token], *full, self.gains[token, slot])
        for slot in range(self.ids.shape[1]):
            out += parts[:, slot]
        if self.shared is not None:
            s = self.shared
            full = formats.dequantize_fp8_block(s.w13, s.s13), formats.dequantize_fp8_block(s.w2, s.s2)
            out += one(self.x, *full, out.new_ones(len(out)))
        return out

    def run(self, *, straight=False, **options):
        """straight: x in bfloat16, which small tiles read where it lies."""
        guarded = torch.full((len(self.x) + 2, self.x.shape[1]), 77.0, device="cuda")
        out = guarded[1:-1]
        out[:] = torch.nan
        x = self.x.bfloat16() if straight else self.x.float()
        kernels.experts(x, self.ids, self.gains, self.packed, self.offsets, self.rows, limit=LIMIT, out=out, **options)
        assert kernels.report(self.packed) is None
        assert not self.packed.state.any()
        assert (guarded[0] == 77).all() and (guarded[-1] == 77).all()
        return out.clone()


def one(rows, full13, full2, weight):
    gate, up = F.linear(rows.float(), full13).chunk(2, dim=-1)
    hidden = F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT) * weight[:, None]
    return F.linear(hidden.bfloat16().float(), full2)


def close(got, case, atol=4e-3):
    """Hidden values are rounded to bfloat16 on both sides, a few of them to neighbours."""
    assert_close(got, case.expected(), atol=atol, rtol=4e-3, max_diff=1e-6)


@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 33, 130])
@pytest.mark.parametrize("shared", [False, True])
def test_against_the_reference(weights, tokens, shared):
    case = Case(weights, random_ids(tokens, 2, 6), shared=shared)
    got = case.run()
    if tokens:
        close(got, case)


@pytest.mark.parametrize("tile", kernels.TILES)
def test_no_bit_depends_on_tiles_or_ctas_or_launches(weights, tile):
    case = Case(weights, random_ids(45, 3, 6))
    whole = case.run(tile=8)
    close(whole, case)
    for ctas in (132, 7, 1):
        assert_bitwise(case.run(tile=tile, ctas=ctas), whole, name=f"{ctas} CTAs")
    assert_bitwise(case.run(tile=tile, chain=True), whole, name="chain")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tile", "variants"), [(8, (0, 2, 3, 4, 5, 16)), (16, (0, 2, 4)), (32, (0, 2)), (64, (0, 1))])
def test_every_variant_gives_the_same_bits(weights, tile, variants, shared):
    """Also with x read where it lies, several times, on CTAs fewer than the device has."""
    case = Case(weights, random_ids(45, 3, 6), shared=shared)
    whole = case.run(tile=128)
    for variant in variants:
        for straight in (True, False):
            for _ in range(5):
                got = case.run(tile=tile, variant=variant, straight=straight)
                assert_bitwise(got, whole, name=f"variant {variant}, straight {straight}")
        assert_bitwise(case.run(tile=tile, variant=variant, straight=True, ctas=5), whole, name=f"{variant}, 5 CTAs")
        chain = case.run(tile=tile, variant=variant, straight=True, chain=True)
        assert_bitwise(chain, whole, name=f"variant {variant}, chain")


def test_full_size(weights):
    case = Case(weights, random_ids(20, 3, 7), d=5120, inter=2304, experts=7)
    whole = case.run()
    close(whole, case, atol=3e-2)
    for _ in range(20):
        assert_bitwise(case.run(), whole)
    assert_bitwise(case.run(chain=True, tile=8), whole, name="chain")


@pytest.mark.parametrize("tile", kernels.TILES)
def test_one_hot_expert_empty_ones_and_foreign_ids(weights, tile):
    ids = torch.full((70, 2), -1, dtype=torch.int32)
    ids[:, 0] = 2
    ids[3, 1], ids[4, 1], ids[5, 0] = 0, 6, -1
    case = Case(weights, ids)
    close(case.run(tile=tile), case)


def test_nobody_at_home(weights):
    case = Case(weights, torch.full((4, 2), -1, dtype=torch.int32), shared=False)
    assert (case.run() == 0).all()


def test_a_row_depends_on_itself(weights):
    case = Case(weights, random_ids(40, 2, 6))
    whole = case.run()
    for row in (0, 17, 39):
        alone = Case.__new__(Case)
        alone.__dict__.update(case.__dict__)
        alone.x, alone.ids, alone.gains = (t[row : row + 1].contiguous() for t in (case.x, case.ids, case.gains))
        alone.offsets, alone.rows = sort_rows(alone.ids, case.experts)
        assert_bitwise(alone.run(), whole[row : row + 1], name=f"row {row}")


def test_nan_of_a_token_is_its_own(weights):
    case = Case(weights, random_ids(9, 2, 6))
    clean = case.run()
    case.x[4] = torch.nan
    got = case.run()
    assert got[4].isnan().all()
    keep = torch.arange(9) != 4
    assert_bitwise(got[keep], clean[keep])


def test_in_a_graph(weights):
    case = Case(weights, random_ids(12, 2, 6))
    wanted = case.run()
    x, out = case.x.float(), torch.empty_like(wanted)
    graph = torch.cuda.CUDAGraph()
    arguments = (x, case.ids, case.gains, case.packed, case.offsets, case.rows)
    with torch.cuda.graph(graph):
        kernels.experts(*arguments, limit=LIMIT, out=out)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert_bitwise(out, wanted)


def test_refuses_wrong_sizes(weights):
    case = Case(weights, random_ids(2, 2, 6))
    with pytest.raises(ValueError, match="tile"):
        case.run(tile=9)


# ---- W4A8


def folded(case):
    other = Case.__new__(Case)
    other.__dict__.update(case.__dict__)
    other.packed = layout_fp8.pack_experts(*case.raw)
    return other


def expected_fp8(case):
    w13, s13, w2, s2 = case.raw
    parts = case.x.new_zeros(*case.ids.shape, case.x.shape[1], dtype=torch.float32)
    rows = quantized(case.x.float())
    for expert in range(case.experts):
        token, slot = torch.where(case.ids == expert)
        if len(token):
            gate, up = F.linear(rows[token], formats.dequantize_mxfp4(w13[expert], s13[expert])).chunk(2, dim=-1)
            hidden = F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT) * case.gains[token, slot][:, None]
            parts[token, slot] = F.linear(quantized(hidden), formats.dequantize_mxfp4(w2[expert], s2[expert]))
    return parts.sum(1)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 500])
def test_fp8_activations(weights, tokens):
    case = folded(Case(weights, random_ids(tokens, 2, 6), shared=False))
    got = case.run()
    error = (got - expected_fp8(case)).norm() / got.norm()
    assert error < 2e-2  # hidden values that fall to the next E4M3 code
    for ctas in (132, 7):
        assert_bitwise(case.run(ctas=ctas), got, name=f"{ctas} CTAs")
    assert_bitwise(case.run(chain=True), got, name="chain")


def test_fp8_full_size_repeats(weights):
    case = folded(Case(weights, random_ids(200, 3, 7), d=5120, inter=2304, experts=7, shared=False))
    got = case.run()
    assert (got - expected_fp8(case)).norm() / got.norm() < 2e-2
    for _ in range(20):
        assert_bitwise(case.run(), got)


def test_fp8_sums_of_one_sign(weights):
    """Long sums of the same sign: what the tensor unit drops shows first here."""
    case = Case(weights, random_ids(70, 1, 2), d=5120, inter=512, experts=2, shared=False)
    case.x.abs_()
    raw = [t.clone() for t in case.raw]
    raw[0] &= 0x77
    case.raw = tuple(raw)
    case = folded(case)
    got = case.run()
    assert (got - expected_fp8(case)).norm() / got.norm() < 2e-2


def test_fp8_scales_have_no_steps(weights):
    """Activations around a power of two: nothing jumps."""
    case = folded(Case(weights, random_ids(64, 1, 2), experts=2, shared=False))
    case.x.fill_(0.25)
    case.x[:, ::3] = 1.0
    low = case.run()
    case.x[:, ::3] = 1.0078125
    assert (case.run() - low).norm() / low.norm() < 2e-2


def test_fp8_rows_of_zeros(weights):
    case = folded(Case(weights, random_ids(5, 2, 6), shared=False))
    case.x[2] = 0
    got = case.run()
    assert (got[2] == 0).all() and not got.isnan().any()


@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (9, 16), (150, 64), (300, 128)])
def test_experts_anywhere_in_a_pool_and_slots_alone(weights, tokens, tile):
    ids = random_ids(tokens, 3, 6)
    ids[0, 1] = -1
    case = Case(weights, ids, shared=False)
    whole = case.run(tile=tile)
    places = torch.tensor([7, 0, 3, 9, 2, 5], dtype=torch.int32, device="cuda")
    wide = [torch.randint(0, 256, (11, t.shape[1]), dtype=torch.uint8, device="cuda")
            for t in (case.packed.w13, case.packed.w2)]  # fmt: skip
    for to, given in zip(wide, (case.packed.w13, case.packed.w2), strict=True):
        to[places.long()] = given
    case.packed = dataclasses.replace(case.packed, w13=wide[0], w2=wide[1])
    assert_bitwise(case.run(tile=tile, places=places), whole)
    parts = kernels.slot_results(case.x.float(), case.ids, case.gains, case.packed, limit=LIMIT, places=places)
    added = torch.zeros_like(whole)
    for slot in range(3):
        added += torch.where(case.ids[:, slot, None] >= 0, parts[:, slot], 0)
    assert_bitwise(added, whole)


# ---- several ranks on one device


@pytest.mark.parametrize("counts", [(5, 3), (0, 9), (20, 20, 1, 7)])
def test_virtual_ranks_give_the_bits_of_one(weights, counts):
    """A grid for each rank at the same time, several times; also as a chain of launches."""
    world, tokens = len(counts), sum(counts)
    each = 8 // world
    case = Case(weights, random_ids(tokens, 2, 8), experts=8)
    whole = case.run()
    ctas = torch.cuda.get_device_properties(0).multi_processor_count // world
    streams = [torch.cuda.Stream() for _ in counts]
    x, ids, gains = ([part.contiguous() for part in t.split(counts)] for t in (case.x.float(), case.ids, case.gains))
    # one more row each: an empty tensor has no address
    x, gains = ([torch.cat([part, part.new_zeros(1, part.shape[1])])[:-1] for part in t] for t in (x, gains))
    parts = [torch.full((max(1, n) * 3, x[0].shape[1]), torch.nan, device="cuda") for n in counts]
    flags = [torch.zeros(2 * world, dtype=torch.int32, device="cuda") for _ in counts]
    packed, order = [], []
    for rank in range(world):
        mine = slice(rank * each, (rank + 1) * each)
        packed.append(layout.pack_experts(*(t[mine].contiguous() for t in case.raw), case.shared))
        order.append(rank_tables.number_rows(ids, rank, each))
    tables = [rank_tables.Ranks(r, x, gains, parts, flags, order[r][2], tokens) for r in range(world)]
    for chain in (False, True, False):
        outs = [torch.full((len(part) + 1, part.shape[1]), torch.nan, device="cuda") for part in x]
        torch.cuda.synchronize()
        for rank, on in enumerate(streams):
            with torch.cuda.stream(on):
                kernels.experts(
                    x[rank], ids[rank], gains[rank], packed[rank], order[rank][0], order[rank][1], limit=LIMIT,
                    out=outs[rank], ctas=ctas, ranks=tables[rank], chain=chain, tile=16,
                )  # fmt: skip
        torch.cuda.synchronize()
        assert all(kernels.report(p) is None for p in packed)
        got = torch.cat([out[: len(part)] for out, part in zip(outs, x, strict=True)])
        assert_bitwise(got, whole, name=f"chain {chain}")
