"""Stored formats as arithmetic: the bits of `kernel_core.formats`, and gradients that do not see them."""

from __future__ import annotations

import pytest
import torch

from kernel_core import formats
from orchestrator.model.checkpoint.encode import encode
from orchestrator.model.checkpoint.specs import Stored
from orchestrator.train import quantise
from orchestrator.train.parameters import Entry

ROWS = {
    "main": (quantise.main_rows, lambda x: formats.dequantize_main(formats.quantize_main(x))),
    "window": (quantise.window_rows, lambda x: formats.dequantize_window(formats.quantize_window(x))),
    "index": (quantise.index_rows, lambda x: formats.dequantize_index(formats.quantize_index(x))),
}
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])


def hard_values() -> torch.Tensor:
    """float32 [600, 64]: twelve decades, zeros, both signs of every tie, magnitudes below each format's floor."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 64, generator=generator) * 10 ** (torch.rand(600, 1, generator=generator) * 12 - 9)
    x[0] = 0.0
    x[1, :16] = 0.0
    x[2] *= 1e-25
    x[3, ::3] = -0.0
    x[30:34] = x[50:54] / x[50:54].abs().amax(-1, keepdim=True) * torch.tensor([[1e-30], [1e-33], [1e-37], [1e-40]])
    for row, factor in enumerate((1.0, 0.5, 4.0, 2.0**-8, 3.0, 1.1), start=4):
        x[row] = torch.cat((TIES, -TIES)).repeat(4) * factor
    for row in range(10, 30):  # the largest value of a group decides its scale; powers of two and their neighbours
        x[row, ::16] = torch.nextafter(torch.tensor(2.0 ** (row - 20)) * 6, torch.tensor(float(row % 3 - 1) * 1e9))
        x[row, 1::16] = 448 * 2.0 ** (row - 20)
    return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and a.view(torch.int32).equal(b.view(torch.int32))


@pytest.mark.parametrize("kind", ROWS)
def test_rows_have_the_bits_of_their_format(kind):
    ours, theirs = ROWS[kind]
    x = hard_values()
    assert same_bits(ours(x), theirs(x))
    assert not ours(x).equal(x)
    assert ours(x[None].expand(2, -1, -1).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(64, 96), (100, 72), (1, 1), (33, 31), (7, 130)])
def test_fp8_blocks_and_their_edges(shape):
    generator = torch.Generator().manual_seed(shape[0])
    w = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape[0], 1, generator=generator) * 8 - 6)
    w[::5] = 0.0
    assert same_bits(quantise.fp8_blocks(w), formats.dequantize_fp8_block(*formats.quantize_fp8_block(w)))


ENTRIES = [
    Entry("a", "fp8", (64, 96)),
    Entry("b", "fp8", (32, 160)),
    Entry("experts", "fp4", (3, 32, 64)),
    Entry("rows", "table", (37, 64)),
    Entry("matrix", "bf16", (12, 40)),
    Entry("norm", "bf16", (40,)),
    Entry("sink", "f32", (4,)),
]


def decoded(entry: Entry, value: torch.Tensor) -> torch.Tensor:
    """What a checkpoint gives back of a weight."""
    if entry.name == "experts":
        return torch.stack([decoded(Entry("one", "fp4", v.shape), v) for v in value])
    if entry.storage not in ("fp8", "fp4", "table"):
        return value
    tensors = encode(Stored(entry.name, entry.storage, tuple(value.shape)), value)
    parts = tensors[f"{entry.name}.weight"], tensors[f"{entry.name}.scale"]
    name = {"fp8": "dequantize_fp8_block", "fp4": "dequantize_mxfp4", "table": "dequantize_fp8_rows"}[entry.storage]
    return getattr(formats, name)(*parts)


def prepared_inputs():
    generator = torch.Generator().manual_seed(4)
    entries = {e.name: e for e in ENTRIES}
    values = {e.name: torch.randn(e.shape, generator=generator) for e in ENTRIES}
    return entries, {name: torch.nn.Parameter(value) for name, value in values.items()}


def test_prepared_weights_are_those_of_a_checkpoint():
    entries, values = prepared_inputs()
    result = quantise.prepare(entries, values, torch.float32, quantised=True)
    assert list(result) == list(values)
    for name, entry in entries.items():
        assert result[name].equal(decoded(entry, values[name].detach())), name
    plain = quantise.prepare(entries, values, torch.float32, quantised=False)
    assert all(plain[name].equal(values[name]) for name in values)
    assert not any(result[name].equal(values[name]) for name in ("a", "b", "experts", "rows"))


@pytest.mark.parametrize("quantised", [True, False])
def test_matrices_come_in_the_products_dtype(quantised):
    entries, values = prepared_inputs()
    result = quantise.prepare(entries, values, torch.bfloat16, quantised=quantised)
    assert {name for name, value in result.items() if value.dtype == torch.float32} == {"norm", "sink"}
    assert all(result[name].shape == values[name].shape for name in values)


@pytest.mark.parametrize("quantised", [True, False])
def test_gradients_of_weights_pass_straight_through(quantised):
    entries, values = prepared_inputs()
    result = quantise.prepare(entries, values, torch.float32, quantised=quantised)
    upstream = {name: torch.randn_like(value) for name, value in values.items() if name != "b"}
    sum((result[name] * g).sum() for name, g in upstream.items()).backward()
    assert all(values[name].grad.equal(g) for name, g in upstream.items())
    assert values["b"].grad is None or not values["b"].grad.any()


def test_gradients_of_rows_pass_straight_through():
    x, g = hard_values().requires_grad_(), torch.randn(600, 64)
    y = quantise.StraightThrough.apply(quantise.main_rows, x)
    assert y.equal(quantise.main_rows(x))
    assert torch.autograd.grad(y, x, g)[0].equal(g)


def test_a_checkpoint_is_a_fixed_point(engine, imported):
    """Weights that were stored once do not move when they are stored again."""
    from orchestrator.train.parameters import entries

    own = {e.name: e for drafter in (False, True) for e in entries(engine.config, drafter=drafter)}
    assert set(own) == set(imported)
    result = quantise.prepare(own, imported, torch.float32, quantised=True)
    assert all(result[name].equal(imported[name]) for name in own)
