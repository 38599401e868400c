"""Router, permutation and FP8 products: the CUDA C++ kernels against their references."""

from __future__ import annotations

import math

import pytest
import torch

import mega_moe
from kernel_core import using
from kernel_core.testing import assert_bitwise, assert_close
from mega_moe import reference
from mega_moe.cuda import linear as fp8
from mega_moe.cuda import route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def _module():
    pytest.importorskip("mega_moe._cuda")


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (12, 2), (130, 5), (256, 8), (384, 6), (1000, 32)])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_router(experts, top_k, tokens):
    logits, bias, bias_vl = torch.randn(tokens, experts) * 4, torch.randn(experts), torch.randn(experts)
    is_image = torch.arange(tokens) % 3 == 0
    ids, weights = mega_moe.route(
        logits.cuda(), bias.cuda(), top_k, bias_vl=bias_vl.cuda(), is_image=is_image.cuda(), routed_scale=2.5
    )
    ids, weights = ids.cpu(), weights.cpu()
    score = reference.sqrt_softplus(logits.double())
    biased = score + torch.where(is_image[:, None], bias_vl, bias).double()
    order = biased.gather(1, ids.long())
    assert (order.diff(dim=1) < 1e-6).all()
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    assert (order[:, -1] > biased.scatter(1, ids.long(), -math.inf).amax(1) - 1e-6).all()
    picked = score.gather(1, ids.long())
    assert_close(weights, (picked / picked.sum(1, keepdim=True) * 2.5).float(), atol=1e-7, rtol=4e-6)
    alone, gain = mega_moe.route(
        logits[-1:].cuda(), bias.cuda(), top_k, bias_vl=bias_vl.cuda(), is_image=is_image[-1:].cuda(), routed_scale=2.5
    )
    assert_bitwise(alone.cpu(), ids[-1:])
    assert_bitwise(gain.cpu(), weights[-1:])


def test_router_special_values():
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, 1.0, nan, 2.0], [nan] * 4, [-inf, -inf, -inf, -300.0], [nan, nan, nan, 1.0]])
    ids, weights = mega_moe.route(logits.cuda(), torch.zeros(4).cuda(), 2)
    assert ids.tolist() == [[3, 1], [0, 1], [0, 1], [3, 0]]
    assert weights[0].isfinite().all() and weights[1].isnan().all() and weights[3].isnan().all()
    assert torch.equal(weights[2].cpu(), torch.zeros(2))
    logits = torch.zeros(3, 40)
    logits[1, 30:] = 1.0
    logits[2, [5, 35]] = 2.0
    ids, weights = mega_moe.route(logits.cuda(), torch.zeros(40).cuda(), 4)
    assert ids.tolist() == [[0, 1, 2, 3], [30, 31, 32, 33], [5, 35, 0, 1]]
    x = torch.cat((torch.linspace(-170, 170, 4001), torch.tensor([1e4, 1e30, 0.0, -0.0])))
    logits = torch.stack((x, x + 0.25), dim=1)
    ids, weights = mega_moe.route(logits.cuda(), torch.zeros(2).cuda(), 2, routed_scale=1.0)
    y = logits.double()
    exact = torch.where(y < -30, torch.exp(y / 2), torch.log1p(torch.exp(-y.abs())).add(y.clamp_min(0)).sqrt())
    score = exact.gather(1, ids.cpu().long())
    assert_close(weights.cpu(), (score / (score.sum(1, keepdim=True) + 1e-20)).float(), atol=0, rtol=4e-6)


def sorted_rows(ids, experts, shared):
    flat = ids.flatten().long()
    order = torch.sort(torch.where(flat < 0, experts, flat), stable=True).indices
    counts = torch.bincount(flat[flat >= 0], minlength=experts)
    rows = order[: int(counts.sum())]
    if shared:
        counts = torch.cat((counts, torch.tensor([len(ids)])))
        rows = torch.cat((rows, torch.arange(len(ids)) + flat.numel()))
    return torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int(), rows.int()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["random", "hot", "empty", "few"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(0, 4, 2), (1, 7, 6), (64, 48, 6), (1024, 384, 6), (8192, 384, 6), (5000, 1000, 8)]
)
def test_permutation(tokens, experts, top_k, kind, shared):
    ids = torch.randint(-1, experts, (tokens, top_k), dtype=torch.int32)
    if kind == "hot":
        ids[:, 0] = experts // 2
    elif kind == "empty":
        ids[:] = -1
    elif kind == "few":
        ids.clamp_(max=1)
    offsets, rows = sorted_rows(ids, experts, shared)
    there = ids.cuda()
    for _ in range(5):
        made = route.permute(there, experts, shared=shared)
        assert_bitwise(made.offsets.cpu(), offsets)
        assert_bitwise(made.rows.cpu()[: len(rows)], rows)
        assert (made.rows[len(rows) :] == -1).all()


@pytest.mark.parametrize("tokens", [1, 8, 9, 256, 341])
def test_one_launch_equals_two(tokens):
    logits, bias = torch.randn(tokens, 384).cuda(), torch.randn(384).cuda()
    ticket = route.new_ticket(logits.device)
    ids, weights = mega_moe.route(logits, bias, 6)
    made = route.permute(ids, 384, shared=True)
    for _ in range(20):
        ids2, weights2, made2 = route.route_permute(logits, bias, 6, ticket, shared=True)
        for a, b in ((ids2, ids), (weights2, weights), (made2.offsets, made.offsets), (made2.rows, made.rows)):
            assert_bitwise(a, b)
    assert ticket.item() == 0


def build(tokens, groups, rows, columns):
    x = torch.randn(tokens, groups, columns)
    weight = torch.randn(groups * rows, columns).to(torch.float8_e4m3fn)
    scale = torch.randint(115, 130, (-(-groups * rows // 32), columns // 32)).to(torch.uint8)
    return x, weight, scale


def exact(x, weight, scale):
    groups = x.shape[1]
    matrix = reference.dequantize(weight, scale).double().unflatten(0, (groups, -1))
    return torch.einsum("tgi,goi->tgo", x.double(), matrix), torch.einsum(
        "tgi,goi->tgo", x.double().abs(), matrix.abs()
    )


def run(x, weight, scale, **options):
    tokens, groups = x.shape[:2]
    rows = len(weight) // groups
    whole = torch.full((tokens * groups * rows + 128,), math.nan, device="cuda")
    whole[:64], whole[-64:] = 7.0, 7.0
    out = whole[64:-64].view(tokens, groups, rows)
    fp8.linear(x.cuda(), weight.cuda(), scale.cuda(), out, groups, **options)
    torch.cuda.synchronize()
    assert (whole[:64] == 7.0).all() and (whole[-64:] == 7.0).all()
    return out


CUTS = [
    {"warps": warps, "tile": tile, "stages": stages}
    for warps, tile, stages in ((8, 8, 4), (4, 8, 8), (2, 8, 8), (2, 16, 8), (8, 16, 4), (4, 32, 4))
]


@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "columns"),
    [(1, 1, 1, 64), (1, 1, 512, 5120), (5, 1, 130, 576), (16, 8, 64, 512), (33, 1, 300, 2304), (64, 2, 160, 1024),
     (65, 1, 96, 6144), (200, 1, 129, 128)],
)  # fmt: skip
def test_products(tokens, groups, rows, columns):
    x, weight, scale = build(tokens, groups, rows, columns)
    wanted, bound = exact(x, weight, scale)
    first = run(x, weight, scale)
    assert ((first.cpu().double() - wanted).abs() <= 2e-6 * bound + 1e-30).all()
    for options in CUTS:
        assert_bitwise(run(x, weight, scale, **options), first)
    for i in (0, tokens - 1):
        assert_bitwise(run(x[i : i + 1], weight, scale), first[i : i + 1])
    rounded = x.bfloat16().float()
    wanted, bound = exact(rounded, weight, scale)
    once = run(rounded, weight, scale, terms=1)
    assert ((once.cpu().double() - wanted).abs() <= 2e-6 * bound + 1e-30).all()
    two = run(x, weight, scale, terms=2)
    wanted, bound = exact(x, weight, scale)
    assert ((two.cpu().double() - wanted).abs() <= 2e-5 * bound + 1e-30).all()
    op = mega_moe.grouped_linear(x.cuda(), weight.cuda(), scale.cuda())
    assert_bitwise(op, first)
    with using("library"):
        assert_close(op, mega_moe.grouped_linear(x.cuda(), weight.cuda(), scale.cuda()), atol=1e-3, rtol=1e-3)
    for _ in range(20):
        assert_bitwise(run(x, weight, scale), first)


def test_special_values_stay_where_they_are():
    x, weight, scale = build(9, 1, 100, 320)
    clean = run(x, weight, scale)
    x[3, 0, 100], x[4, 0, 5] = math.nan, math.inf
    raw = weight.view(torch.uint8)
    raw[5, 17] = 0xFF
    scale[2, 1] = 255
    made = run(x, weight, scale)
    assert made[3].isnan().all() and made[:, :, 5].isnan().all() and made[:, :, 64:96].isnan().all()
    assert (~made[4].isfinite()).any()
    tokens, rows = [0, 1, 2, 5, 6, 7, 8], [r for r in range(100) if r != 5 and not 64 <= r < 96]
    assert_bitwise(made[tokens][:, :, rows], clean[tokens][:, :, rows])


def test_bad_arguments_write_nothing():
    x, weight, scale = build(2, 1, 64, 128)
    out = torch.zeros(2, 1, 64).cuda()
    moved = x.cuda(), weight.cuda(), scale.cuda()
    for options in ({"terms": 4}, {"ctas": 3}, {"warps": 5}, {"tile": 7}, {"stages": 5}):
        with pytest.raises(ValueError, match="linear"):
            fp8.linear(*moved, out, **options)
    torch.cuda.synchronize()
    assert (out == 0).all()


def test_many_rows_where_bits_may_depend_on_them():
    x, weight, scale = build(100, 1, 256, 640)
    wanted, bound = exact(x, weight, scale)
    made = mega_moe.linear(x[:, 0].cuda(), weight.cuda(), scale.cuda(), reproducible=False)
    assert ((made.cpu().double() - wanted[:, 0]).abs() <= 4e-6 * bound[:, 0] + 1e-30).all()
