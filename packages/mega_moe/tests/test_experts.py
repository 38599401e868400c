"""Fused experts against the reference and against the chain of single products."""

from __future__ import annotations

import pytest
import torch

import kernel_core
import mega_moe
from kernel_core.testing import (
    Guarded,
    assert_bitwise,
    assert_close,
    assert_repeatable,
    assert_row_invariant,
    assert_thread_invariant,
    at_page_end,
    each_isa,
)
from mega_moe import reference


class Layer:
    """Experts of one layer and the call that uses them."""

    def __init__(self, weights, experts: int, d: int, inter: int, shared: int = 0, **scales: int) -> None:
        self.packed = (*weights.mxfp4(experts, 2 * inter, d, **scales), *weights.mxfp4(experts, d, inter, **scales))
        self.shared = weights.shared(d, shared) if shared else None

    def __call__(self, x, ids, gate, **more):
        return mega_moe.fused_experts(x, ids, gate, *self.packed, shared=self.shared, **more)

    def reference(self, x, ids, gate, **more):
        return reference.fused_experts(x, ids, gate, *self.packed, shared=self.shared, **more)


def close(actual: torch.Tensor, expected: torch.Tensor, *, atol: float = 2e-6) -> None:
    """`atol` in units of the largest element."""
    size = expected.nan_to_num().abs().max().item() if expected.numel() else 1.0
    assert_close(actual, expected, atol=atol * size, rtol=1e-5, max_row_diff=1e-10)


CASES = [
    # tokens, experts, top_k, d, inter, shared
    (0, 4, 2, 64, 32, 32),
    (1, 8, 2, 128, 32, 32),
    (1, 12, 2, 256, 64, 64),
    (5, 12, 2, 256, 64, 0),
    (7, 1, 1, 32, 32, 0),
    (16, 20, 6, 160, 96, 96),
    (33, 5, 3, 224, 160, 64),
    (3, 384, 6, 64, 32, 32),
    (2, 6, 0, 64, 32, 64),
]


@each_isa()
@pytest.mark.parametrize(("tokens", "experts", "top_k", "d", "inter", "shared"), CASES)
def test_matches_the_reference(weights, isa, tokens, experts, top_k, d, inter, shared):
    layer = Layer(weights, experts, d, inter, shared)
    x = weights.normal(tokens, d) * 30
    ids, gate = weights.routing(tokens, experts, top_k)
    out = Guarded((tokens, d))
    with kernel_core.limit_isa(isa):
        layer(x, ids, gate, out=out.tensor)
    out.check()
    close(out.tensor, layer.reference(x, ids, gate))


@each_isa()
@pytest.mark.parametrize("tokens", [64, 150])
def test_prefill(weights, isa, tokens):
    layer = Layer(weights, 12, 256, 64, 64)
    x = weights.normal(tokens, 256) * 30
    ids, gate = weights.routing(tokens, 12, 2)
    with kernel_core.limit_isa(isa):
        close(layer(x, ids, gate), layer.reference(x, ids, gate))


@each_isa()
def test_real_width(weights, isa):
    layer = Layer(weights, 2, 5120, 2304, 0)
    x = weights.normal(2, 5120) * 4
    ids, gate = weights.routing(2, 2, 2)
    if isa == "scalar":
        x, ids, gate = x[:1], ids[:1], gate[:1]
    with kernel_core.limit_isa(isa):  # one lane adds 5120 numbers in a row, which costs some digits
        close(layer(x, ids, gate), layer.reference(x, ids, gate), atol=1e-5 if isa == "scalar" else 2e-6)


@each_isa()
def test_clamps_are_asymmetric(weights, isa):
    d = inter = 32
    w13 = torch.zeros(1, 64, 16, dtype=torch.uint8)
    w13[0, :32, 0], w13[0, 32:, 0] = 0x02, 0x20  # gate = x[0], up = x[1]
    w2 = torch.zeros(1, d, 16, dtype=torch.uint8)
    w2[0, :, 0] = 0x02  # y = h[0]
    one13, one2 = torch.full((1, 64, 1), 127, dtype=torch.uint8), torch.full((1, d, 1), 127, dtype=torch.uint8)
    values = torch.tensor([-60.0, -12.0, -10.0, -3.0, 0.0, 9.5, 10.0, 11.0, 500.0])
    x = torch.zeros(81, d)
    x[:, 0], x[:, 1] = values.repeat_interleave(9), values.repeat(9)
    ids, gate = torch.zeros(81, 1, dtype=torch.int32), torch.full((81, 1), 0.75)
    with kernel_core.limit_isa(isa):
        y = mega_moe.fused_experts(x, ids, gate, w13, one13, w2, one2, limit=10.0)
    g, u = x[:, 0].clamp(max=10.0), x[:, 1].clamp(-10.0, 10.0)
    expected = torch.nn.functional.silu(g) * u * 0.75
    assert inter == 32
    assert_close(y, expected[:, None].expand(-1, d), atol=1e-20, rtol=1e-6)
    with kernel_core.limit_isa(isa):
        loose = mega_moe.fused_experts(x, ids, gate, w13, one13, w2, one2, limit=100.0)
    assert not torch.equal(loose, y)


@each_isa()
@pytest.mark.parametrize("pattern", ["all_to_one", "one_hot_expert", "none", "holes", "duplicates"])
def test_routing_patterns(weights, isa, pattern):
    tokens, experts, top_k = 37, 6, 3
    layer = Layer(weights, experts, 96, 64, 32 if pattern != "none" else 0)
    x = weights.normal(tokens, 96) * 30
    ids, gate = weights.routing(tokens, experts, top_k)
    if pattern == "all_to_one":
        ids, gate = torch.full((tokens, 1), 4, dtype=torch.int32), gate[:, :1].contiguous()
    elif pattern == "one_hot_expert":
        ids[:, 0] = 5
    elif pattern == "none":
        ids.fill_(-1)
    elif pattern == "holes":
        ids[::2, 1], ids[3] = -1, -1
    else:
        ids[:, 1] = ids[:, 0]
    gate[ids < 0] = float("nan")  # weights of empty slots are never used
    with kernel_core.limit_isa(isa):
        y = layer(x, ids, gate)
        assert_row_invariant(layer, x, ids, gate)
    close(y, layer.reference(x, ids, gate.nan_to_num()))
    if pattern == "none":
        assert torch.equal(y, torch.zeros_like(y))


@each_isa()
def test_rows_do_not_depend_on_the_batch(weights, isa):
    layer = Layer(weights, 4, 544, 96, 64)
    x = weights.normal(75, 544) * 30
    ids, gate = weights.routing(75, 4, 2)
    with kernel_core.limit_isa(isa):
        assert_row_invariant(layer, x, ids, gate, pick=[0, 1, 17, 40, 74])
        whole = layer(x, ids, gate)
        for count in (2, 5, 11, 30, 31, 50):
            part = layer(x[:count].contiguous(), ids[:count].contiguous(), gate[:count].contiguous())
            assert_bitwise(part, whole[:count], name=f"{count} rows")


@each_isa()
def test_repeats_and_threads(weights, isa):
    layer = Layer(weights, 8, 256, 64, 64)
    x = weights.normal(40, 256) * 30
    ids, gate = weights.routing(40, 8, 2)
    with kernel_core.limit_isa(isa):
        assert_repeatable(lambda: layer(x, ids, gate))
        assert_thread_invariant(lambda: layer(x, ids, gate))


@each_isa()
@pytest.mark.parametrize("scale_byte", [0, 1, 2, 3, 0x73, 0x78, 127, 200])
def test_scale_bytes(weights, isa, scale_byte):
    """Small scales meet large activations, so that nothing vanishes; 0 and 1 leave bfloat16's normal numbers."""
    layer = Layer(weights, 3, 64, 32, low=scale_byte, high=scale_byte + 1)
    layer.packed = (*layer.packed[:3], torch.full_like(layer.packed[3], 120))
    x = weights.normal(9, 64) * 2.0 ** min(126, 127 - scale_byte)
    ids, gate = weights.routing(9, 3, 2)
    with kernel_core.limit_isa(isa):
        y = layer(x, ids, gate)
        assert_row_invariant(layer, x, ids, gate)
    assert y.isfinite().all() and y.abs().max() > 0
    close(y, layer.reference(x, ids, gate))


@each_isa()
def test_scales_of_one_row_reach_over_the_whole_range(weights, isa):
    """Row sums with exponents from end to end: the worst case for exponent arithmetic on packed numbers."""
    layer = Layer(weights, 2, 512, 64)
    scales = torch.linspace(0, 140, 16).to(torch.uint8)
    layer.packed = (layer.packed[0], scales.expand(2, 128, 16).contiguous(), *layer.packed[2:])
    x = weights.normal(6, 512) * 1e-3
    ids, gate = weights.routing(6, 2, 2)
    with kernel_core.limit_isa(isa):
        close(layer(x, ids, gate), layer.reference(x, ids, gate))


@each_isa()
@pytest.mark.parametrize("large", [250, 252, 253, 254, 255])
def test_large_scales_and_nan(weights, isa, large):
    layer = Layer(weights, 2, 64, 32)
    w13, s13, w2, s2 = layer.packed
    s2 = s2.clone()
    s2[0, 5, 0] = large  # one row of one expert
    layer.packed = (w13, s13, w2, s2)
    x = weights.normal(4, 64) * 1e-30
    ids = torch.tensor([[0], [1], [0], [1]], dtype=torch.int32)
    gate = torch.full((4, 1), 1e-3)
    with kernel_core.limit_isa(isa):
        y = layer(x, ids, gate)
    expected = layer.reference(x, ids, gate)
    assert torch.equal(y.isnan(), expected.isnan())
    assert y[[1, 3]].isfinite().all() and y[:, :5].isfinite().all()


@each_isa()
def test_long_sums_of_one_sign(weights, isa):
    layer = Layer(weights, 1, 4096, 32)
    w13, s13, w2, s2 = layer.packed
    w13, s13 = w13 & 0x77, torch.full_like(s13, 0x73)
    layer.packed = (w13, s13, w2, s2)
    x = weights.normal(2, 4096).abs()
    ids, gate = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    with kernel_core.limit_isa(isa):
        y = layer(x, ids, gate, limit=1e4)
    expected = layer.reference(x.double().float(), ids, gate, limit=1e4)
    assert_close(y, expected, atol=5e-5 * expected.abs().max().item(), rtol=5e-5)


@each_isa()
def test_equals_the_chain_of_products(weights, isa):
    """A shared expert alone is gate and up product, activation, down product."""
    layer = Layer(weights, 1, 256, 64, 96)
    x = weights.normal(10, 256) * 30
    ids, gate = torch.full((10, 1), -1, dtype=torch.int32), torch.zeros(10, 1)
    shared = layer.shared
    with kernel_core.limit_isa(isa):
        y = layer(x, ids, gate)
        both = mega_moe.linear(x, shared.w13, shared.s13)
        g, u = both[:, :96].clamp(max=10.0), both[:, 96:].clamp(-10.0, 10.0)
        chain = mega_moe.linear(torch.nn.functional.silu(g) * u, shared.w2, shared.s2)
    close(y, chain)


@each_isa()
def test_reads_nothing_behind_its_arguments(weights, isa):
    layer = Layer(weights, 3, 96, 32, 32)
    x = weights.normal(5, 96)
    ids, gate = weights.routing(5, 3, 2)
    with kernel_core.limit_isa(isa):
        expected = layer(x, ids, gate)
        layer.packed = tuple(at_page_end(t) for t in layer.packed)
        shared = layer.shared
        layer.shared = mega_moe.SharedExpert(*(at_page_end(getattr(shared, n)) for n in ("w13", "s13", "w2", "s2")))
        assert_bitwise(layer(at_page_end(x), at_page_end(ids), at_page_end(gate)), expected)


@each_isa()
def test_nan_stays_in_its_row(weights, isa):
    layer = Layer(weights, 3, 64, 32, 32)
    x = weights.normal(8, 64)
    ids, gate = weights.routing(8, 3, 2)
    with kernel_core.limit_isa(isa):
        clean = layer(x, ids, gate)
        x[3, 11] = float("nan")
        y = layer(x, ids, gate)
    assert y[3].isnan().all()
    keep = [0, 1, 2, 4, 5, 6, 7]
    assert_bitwise(y[keep], clean[keep])


def test_bad_arguments(weights):
    layer = Layer(weights, 3, 64, 32, 32)
    x = weights.normal(4, 64)
    ids, gate = weights.routing(4, 3, 2)
    w13, s13, w2, s2 = layer.packed
    shared, out = layer.shared, torch.full((4, 64), 7.0)
    too_big, too_small = ids.clone(), ids.clone()
    too_big[2, 1], too_small[0, 0] = 3, -2
    cases = [
        ("x", dict(x=x.double())),
        ("x", dict(x=weights.normal(4, 48), w13=w13[..., :24].contiguous())),
        ("ids", dict(ids=ids.long())),
        ("ids", dict(ids=ids[:3])),
        ("ids", dict(ids=too_big)),
        ("ids", dict(ids=too_small)),
        ("weights", dict(weights=gate[:, :1].contiguous())),
        ("w13", dict(w13=w13.view(torch.int8))),
        ("w13", dict(w13=w13[:, :62].contiguous())),
        ("w13", dict(w13=w13[..., ::2])),
        ("s13", dict(s13=s13[:, :, :1].contiguous())),
        ("w2", dict(w2=w2[:2])),
        ("s2", dict(s2=s2.float())),
        ("limit", dict(limit=0.0)),
        ("limit", dict(limit=float("nan"))),
        ("out", dict(out=torch.empty(4, 32))),
        ("shared.w2", dict(shared=weights.shared(96, 32))),
    ]
    for backend in ("native", "reference"):
        for argument, change in cases:
            given = dict(x=x, ids=ids, weights=gate, w13=w13, s13=s13, w2=w2, s2=s2, out=out, shared=shared) | change
            positional = [given.pop(n) for n in ("x", "ids", "weights", "w13", "s13", "w2", "s2")]
            with kernel_core.using(backend), pytest.raises(ValueError, match=rf"^{argument}: got .*allowed is"):
                mega_moe.fused_experts(*positional, **given)
    assert (out == 7.0).all()


def test_shared_expert_checks_itself(weights):
    good = weights.shared(64, 32)
    cases = [
        ("shared.w13", dict(w13=good.w13.view(torch.uint8))),
        ("shared.w13", dict(w13=good.w13[:32])),
        ("shared.w13", dict(w13=good.w13[:, :16].contiguous())),
        ("shared.s13", dict(s13=good.s13.float())),
        ("shared.w2", dict(w2=good.w2.T)),
        ("shared.s2", dict(s2=good.s13)),
    ]
    for argument, change in cases:
        given = dict(w13=good.w13, s13=good.s13, w2=good.w2, s2=good.s2) | change
        with pytest.raises(ValueError, match=rf"^{argument}: got .*allowed is"):
            mega_moe.SharedExpert(**given)


def test_registered_op(weights):
    layer = Layer(weights, 3, 64, 32, 32)
    x = weights.normal(4, 64)
    ids, gate = weights.routing(4, 3, 2)
    s = layer.shared
    got = torch.ops.mega_moe.fused_experts(x, ids, gate, *layer.packed, 10.0, s.w13, s.s13, s.w2, s.s2)
    assert_bitwise(got, layer(x, ids, gate))
