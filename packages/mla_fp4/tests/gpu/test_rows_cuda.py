"""Row kernels on a device against the references: to the bit wherever no norm and no exponential is involved."""

from __future__ import annotations

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing import assert_bitwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUMBERS = {"main": 0, "window": 1, "index": 2, "float32": 3}
QUANTIZE = {"main": formats.quantize_main, "window": formats.quantize_window, "index": formats.quantize_index}
WIDTHS = [("main", 512), ("window", 512), ("index", 128), ("main", 64), ("window", 64), ("index", 32), ("main", 256)]


@pytest.fixture
def cuda():
    return pytest.importorskip("mla_fp4._cuda")


def at(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def dtype(tensor: torch.Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


def angles(rows: int, rope_dim: int) -> torch.Tensor:
    a = torch.randn(rows, rope_dim // 2) * 100
    return torch.cat([a.cos(), a.sin()], dim=1)


def norm_rope(cuda, x, weight, eps, rope, *, inverse=False, out=None, to=torch.float32):
    """As `mla_fp4.norm_rope`, on tensors of a device."""
    out = torch.empty_like(x, dtype=to) if out is None else out
    rows, d = x.shape[0], x.shape[-1]
    cuda.norm_rope(
        at(x), at(weight), at(rope), at(out), rows, x.numel() // max(rows * d, 1), d,
        0 if rope is None else rope.shape[1], eps, inverse, dtype(x), dtype(out), stream(),
    )  # fmt: skip
    return out


def kv_rows(cuda, x, weight, eps, rope, format, *, slots=None, out=None, rows_per_block=0, round_bf16=False):
    rows, d = x.shape
    size = d * 4 if format == "float32" else QUANTIZE[format](torch.zeros(1, d)).shape[1]
    out = torch.zeros(rows, size, dtype=torch.uint8, device=x.device) if out is None else out
    cuda.kv_rows(
        at(x), at(weight), at(rope), at(slots), at(out), rows, d, 0 if rope is None else rope.shape[1],
        out.numel() // size, rows_per_block, eps, NUMBERS[format], round_bf16, dtype(x), stream(),
    )  # fmt: skip
    return out


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("shape", "rope_dim"), [((5, 64, 512), 64), ((3, 4, 64), 16), ((2, 1280), 64), ((7, 32), 32)])
def test_rotation_alone_is_exact(cuda, shape, rope_dim, inverse):
    x, rope = torch.randn(shape), angles(shape[0], rope_dim)
    with using("reference"):
        expected = mla_fp4.norm_rope(x, None, 1e-20, rope, inverse=inverse)
    device, turns = x.cuda(), rope.cuda()
    assert_bitwise(norm_rope(cuda, device, None, 1e-20, turns, inverse=inverse).cpu(), expected)
    rounded = norm_rope(cuda, device, None, 1e-20, turns, inverse=inverse, to=torch.bfloat16)
    assert_bitwise(rounded.cpu(), expected.bfloat16())
    norm_rope(cuda, device, None, 1e-20, turns, inverse=inverse, out=device)  # in place
    assert_bitwise(device.cpu(), expected)


@pytest.mark.parametrize("d", [32, 128, 512, 520, 1280, 2048, 5120, 8192])
def test_norm_is_close_and_of_the_row_alone(cuda, d):
    x, weight = torch.randn(33, d) * 4, torch.randn(d)
    x[3] = 0
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-20).sqrt() * weight.double()
    device, w = x.cuda(), weight.cuda()
    out = norm_rope(cuda, device, w, 1e-20, None)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-6, atol=1e-6)
    for i in (0, 3, 31, 32):
        assert_bitwise(norm_rope(cuda, device[i : i + 1].clone(), w, 1e-20, None), out[i : i + 1])
    assert_bitwise(norm_rope(cuda, device, w, 1e-20, None, to=torch.bfloat16), out.bfloat16())
    half = device.bfloat16()
    assert_bitwise(norm_rope(cuda, half, w, 1e-20, None), norm_rope(cuda, half.float(), w, 1e-20, None))


@pytest.mark.parametrize("round_bf16", [False, True])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("format", "d"), WIDTHS)
def test_rows_without_a_norm_are_exact(cuda, format, d, source, round_bf16):
    x = (torch.randn(301, d) * torch.logspace(-38, 30, 301)[:, None]).to(source)
    x[0] = 0
    x[1, 5], x[2, 6], x[3, 7] = float("nan"), float("inf"), -float("inf")
    rope = angles(301, 16)
    with using("reference"):
        expected = mla_fp4.kv_rows(x.float(), None, 1e-20, rope, format=format, round_bf16=round_bf16)
    assert_bitwise(kv_rows(cuda, x.cuda(), None, 1e-20, rope.cuda(), format, round_bf16=round_bf16).cpu(), expected)


@pytest.mark.parametrize(("format", "d"), WIDTHS)
def test_rows_with_a_norm(cuda, format, d):
    x, weight, rope = torch.randn(100, d).cuda(), torch.rand(d).cuda() + 0.5, angles(100, 16).cuda()
    plain = kv_rows(cuda, x, weight, 1e-20, rope, "float32").view(torch.float32)
    rows = kv_rows(cuda, x, weight, 1e-20, rope, format)
    assert_bitwise(rows.cpu(), QUANTIZE[format](plain.cpu()))  # quantisation sees the very floats of the other format
    with using("reference"):
        expected = mla_fp4.norm_rope(x.cpu(), weight.cpu(), 1e-20, rope.cpu())
    torch.testing.assert_close(plain.cpu(), expected, rtol=4e-6, atol=2e-6)
    for i in (0, 57, 99):
        alone = kv_rows(cuda, x[i : i + 1].clone(), weight, 1e-20, rope[i : i + 1].clone(), format)
        assert_bitwise(alone, rows[i : i + 1])


@pytest.mark.parametrize(
    ("format", "d", "rows_per_block"),
    [("main", 512, 0), ("window", 512, 0), ("index", 128, 64), ("index", 128, 128), ("index", 32, 3), ("main", 64, 0)],
)
def test_slots(cuda, format, d, rows_per_block):
    per_block, blocks = rows_per_block or 67, 5
    x = torch.randn(150, d)
    rows = QUANTIZE[format](x)
    slots = torch.cat([torch.randperm(per_block * blocks)[:140], torch.full((150,), -1)])[:150]
    slots[slots == 7] = per_block * blocks  # out of range: skipped like -1
    pages = torch.full((blocks, per_block * rows.shape[1]), 0xA5, dtype=torch.uint8)
    expected = pages.clone()
    kept = torch.where(slots < per_block * blocks, slots, -1)
    with using("reference"):
        if rows_per_block:
            mla_fp4.store_index(rows, expected, kept, per_block)
        else:
            mla_fp4.store_main(rows, expected.view(blocks, per_block, -1), kept)
    fused, copied = pages.cuda(), pages.cuda()
    kv_rows(cuda, x.cuda(), None, 1.0, None, format, slots=slots.cuda(), out=fused, rows_per_block=rows_per_block)
    assert_bitwise(fused.cpu(), expected)
    codes = rows.shape[1] * 16 // 17 if format == "index" else rows.shape[1]
    device = rows.cuda()
    targets = slots.cuda()
    cuda.store_rows(
        at(device), at(targets), at(copied), 150, codes, rows.shape[1] - codes, rows_per_block, blocks * per_block,
        stream(),
    )  # fmt: skip
    assert_bitwise(copied.cpu(), expected)


def compress(cuda, kv, gate, tail, slot, cu, start, groups):
    out = torch.full((groups, kv.shape[1]), float("nan"), device=kv.device)
    cuda.compress(
        at(kv), at(gate), at(tail), at(slot), at(cu), at(start), at(out), start.numel(), *kv.shape, tail.shape[0],
        tail.shape[1], groups, stream(),
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("d", "ring"), [(512, 7), (512, 2), (64, 7), (4, 1)])
def test_compress(cuda, d, ring):
    lengths = [0, 1, 2, 5, 0, 300, 1, 6, 0] + [1] * 60
    start = torch.randint(0, 50, (len(lengths),))
    start[1], start[6] = 4, 9
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = int(cu[-1])
    kv, gate = torch.randn(rows, d), torch.randn(rows, d) * 5
    tail = torch.randn(80, ring, 2, d)
    slot = torch.randperm(80)[: len(lengths)].int()
    device = [t.cuda() for t in (kv, gate, tail, slot, cu, start)]
    with using("reference"):
        expected = mla_fp4.compress(kv, gate, tail, slot, cu, start)  # changes `tail`
    out = compress(cuda, *device, len(expected))
    torch.testing.assert_close(out.cpu(), expected, rtol=4e-6, atol=2e-6)
    assert_bitwise(device[2].cpu(), tail)


def test_compress_one_at_a_time_gives_the_same_bits(cuda):
    kv, gate = torch.randn(40, 512).cuda(), torch.randn(40, 512).cuda()
    slot, start = torch.zeros(1, dtype=torch.int32).cuda(), torch.zeros(1, dtype=torch.int64).cuda()
    tails = torch.zeros(2, 1, 7, 2, 512).cuda()
    whole = compress(cuda, kv, gate, tails[0], slot, torch.tensor([0, 40]).int().cuda(), start, 20)
    one = torch.tensor([0, 1]).int().cuda()
    steps = [
        compress(cuda, kv[i : i + 1].clone(), gate[i : i + 1].clone(), tails[1], slot, one, start + i, i % 2)
        for i in range(40)
    ]
    assert_bitwise(torch.cat(steps), whole)
    assert_bitwise(tails[1], tails[0])


def test_bad_arguments_write_nothing(cuda):
    x, out = torch.randn(4, 512).cuda(), torch.zeros(4, 288, dtype=torch.uint8).cuda()
    with pytest.raises(ValueError, match="kv_rows"):
        cuda.kv_rows(at(x) + 4, 0, 0, 0, at(out), 4, 512, 0, 4, 0, 1.0, 0, False, 0, stream())  # unaligned
    with pytest.raises(ValueError, match="kv_rows"):
        cuda.kv_rows(at(x), 0, 0, 0, at(out), 4, 500, 0, 4, 0, 1.0, 0, False, 0, stream())  # width
    with pytest.raises(ValueError, match="norm_rope"):
        cuda.norm_rope(at(x), 0, 0, at(x), 4, 1, 512, 0, 1.0, False, 0, 1, stream())  # in place, other type
    torch.cuda.synchronize()
    assert (out == 0).all()
