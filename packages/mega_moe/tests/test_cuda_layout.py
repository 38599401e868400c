"""Weights as the SM90 kernels read them: packing loses nothing, and device code decodes what was packed."""

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from kernel_core.testing.host import address, host_library
from mega_moe import reference
from mega_moe.cuda import layout, layout_fp8

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    return host_library(HERE / "host/expert_layout.cpp", tmp_path_factory.mktemp("layout"), HERE.parent / "csrc")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (384, 768)])
def test_mxfp4_comes_back(weights, rows, columns, interleaved):
    codes, scale = weights.mxfp4(rows, columns, low=0, high=129)
    packed = layout.pack_mxfp4(codes, scale, interleaved=interleaved)
    assert packed.numel() == rows // 128 * (columns // 128) * 8704
    again = layout.unpack_mxfp4(packed, rows, columns, interleaved=interleaved)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scale)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (384, 768)])
def test_fp8_comes_back(weights, rows, columns, interleaved):
    if interleaved:
        rows *= 2
    codes, scale = weights.fp8(rows, columns, low=0, high=135)
    packed = layout.pack_fp8(codes, scale, interleaved=interleaved)
    assert packed.numel() == rows // 128 * (columns // 64) * 8224
    again = layout.unpack_fp8(packed, rows, columns, interleaved=interleaved)
    assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(again[1], scale)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_operand_registers(lib, weights, kind):
    """Every code and scale of a packed block, through the device's arithmetic, is the weight."""
    rows, columns = 128, 512
    out = torch.zeros(rows, columns)
    if kind == "mxfp4":
        codes, scale = weights.mxfp4(rows, columns, low=0, high=129)
        packed = layout.pack_mxfp4(codes, scale, interleaved=False)
        expected = reference.dequantize_mxfp4(codes, scale)
    else:
        codes, scale = weights.fp8(rows, columns, low=100, high=135)
        packed = layout.pack_fp8(codes, scale, interleaved=False)
        expected = reference.dequantize(codes, scale)
    lib.decode_block(int(kind == "fp8"), address(packed), columns, address(out))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_folded_scales_come_back(weights, interleaved):
    codes, scale = weights.mxfp4(256, 384, low=100, high=112)
    packed, factor = layout_fp8.pack(codes, scale, interleaved=interleaved)
    assert packed.numel() == 2 * 3 * 8704
    again = layout_fp8.unpack(packed, factor, 384, interleaved=interleaved)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scale)


def test_folded_scales_are_exact(lib, weights):
    codes, scale = weights.mxfp4(128, 512, low=60, high=72)
    packed, factor = layout_fp8.pack(codes, scale, interleaved=False)
    out = torch.zeros(128, 512)
    lib.decode_block_fp8(address(packed), address(factor), 512, address(out))
    assert torch.equal(out, reference.dequantize_mxfp4(codes, scale))
    scale[7, 3] = 90
    with pytest.raises(ValueError, match="at most 11 powers"):
        layout_fp8.pack(codes, scale, interleaved=False)


def test_places_of_bits(lib):
    for reg in range(4):
        for half in range(2):
            for bit in range(4):
                assert lib.place_of_bit(reg, half, bit) == layout._bit(reg, half, bit)


def test_gate_and_up_of_a_channel_are_a_lanes_rows(weights):
    codes, scale = weights.mxfp4(256, 256)
    rows = layout.unpack_mxfp4(layout.pack_mxfp4(codes, scale, interleaved=True), 256, 256, interleaved=False)[0]
    for tile in range(4):
        for warp in range(4):
            gate = slice(tile * 32 + warp * 8, tile * 32 + warp * 8 + 8)
            at = tile * 64 + warp * 16
            assert torch.equal(rows[at : at + 8], codes[gate])
            assert torch.equal(rows[at + 8 : at + 16], codes[128:][gate])


def test_refuses_what_it_cannot_hold(weights):
    codes, scale = weights.mxfp4(128, 256)
    with pytest.raises(ValueError, match="multiples of 128"):
        layout.pack_mxfp4(codes[:64], scale[:64], interleaved=False)
    scale[3, 1] = 129
    with pytest.raises(ValueError, match="at most 128"):
        layout.pack_mxfp4(codes, scale, interleaved=False)


def test_plan(lib):
    """Items cover every block of every tile once, in the queue's order; images do not overlap."""
    generator = torch.Generator().manual_seed(3)
    for columns in (8, 16, 32, 64, 128):
        counts = torch.randint(0, 150, (9,), generator=generator) * (torch.rand(9, generator=generator) < 0.7)
        counts = counts.int()
        items = torch.zeros(2000, 8, dtype=torch.int32)
        found = lib.list_items(address(counts), 9, 3, 5, columns, address(items), ctypes.c_int(2000))
        listed = items[:found].tolist()
        tiles = [(o, t) for o, count in enumerate(counts.tolist()) for t in range(-(-count // columns))]
        wanted = [(0, o, b, t) for o in range(9) for b in range(3) for oo, t in tiles if oo == o]
        wanted += [(1, o, b, t) for o in range(9) for b in range(5) for oo, t in tiles if oo == o]
        first_tile = {o: next(i for i, (oo, _) in enumerate(tiles) if oo == o) for o, _ in tiles}
        assert [(k, o, b, t - first_tile[o]) for k, o, b, t, *_ in listed] == wanted
        ends = {}
        for _, o, _, t, rows, width, first, image in listed:
            local = t - first_tile[o]
            assert rows == min(columns, counts[o] - local * columns) and rows <= width <= max(
                64 if columns == 128 else 8, 2 * rows
            )
            assert first == counts[:o].sum() + local * columns
            ends[t] = (image, image + width)
        spans = [ends[t] for t in sorted(ends)]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        if spans:
            assert spans[-1][1] <= lib.bound_of_images(int(counts.sum()), 1, 9, 0, columns)
            assert len(spans) <= lib.bound_of_tiles(int(counts.sum()), 1, 9, 0, columns)
