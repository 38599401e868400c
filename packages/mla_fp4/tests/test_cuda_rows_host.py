"""The arithmetic and control flow of the CUDA row kernels, run on the host."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

import mla_fp4
from kernel_core import using
from kernel_core.testing.host import address, host_library

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def lib(tmp_path_factory) -> ctypes.CDLL:
    return host_library(HERE / "host" / "rows.cpp", tmp_path_factory.mktemp("rows"), HERE.parent / "csrc")


def angles(rows: int, rope_dim: int) -> torch.Tensor:
    a = torch.randn(rows, rope_dim // 2) * 100
    return torch.cat([a.cos(), a.sin()], dim=1)


def sizes(*numbers: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(n) for n in numbers]


@pytest.mark.parametrize(("d", "rope_dim"), [(32, 16), (64, 16), (128, 64), (256, 64), (512, 64)])
def test_norm_and_rotation(lib, d, rope_dim):
    x, rope, weight = torch.randn(7, d) * 3, angles(7, rope_dim), torch.randn(d)
    out = torch.empty_like(x)
    lib.norm_rotate(address(x), None, address(rope), address(out), *sizes(7, d, rope_dim), ctypes.c_float(1e-20))
    with using("reference"):
        assert torch.equal(out, mla_fp4.norm_rope(x, None, 1e-20, rope))  # no norm: the same bits
        expected = mla_fp4.norm_rope(x, weight, 1e-20, rope)
    lib.norm_rotate(
        address(x), address(weight), address(rope), address(out), *sizes(7, d, rope_dim), ctypes.c_float(1e-20)
    )
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)
    x.zero_()
    lib.norm_rotate(
        address(x), address(weight), address(rope), address(out), *sizes(7, d, rope_dim), ctypes.c_float(1e-20)
    )
    assert (out == 0).all()


@pytest.mark.parametrize("rows_per_block", [0, 3, 64, 128])
@pytest.mark.parametrize(("codes", "scales"), [(256, 32), (512, 16), (64, 4), (16, 1)])
def test_places_in_pages(lib, codes, scales, rows_per_block):
    blocks, per_block = 3, rows_per_block or 5
    rows = torch.randint(0, 256, (40, codes + scales)).to(torch.uint8)
    slots = torch.randperm(blocks * per_block + 40)[:40] - 40
    slots = torch.where((slots < -1) | (slots >= blocks * per_block), -1, slots)
    pages = torch.full((blocks, per_block, codes + scales), 7, dtype=torch.uint8)
    expected = pages.clone()
    lib.store(address(rows), address(slots), address(pages), *sizes(40, codes, scales, rows_per_block))
    with using("reference"):
        if rows_per_block == 0:
            mla_fp4.store_main(rows, expected, slots)
        elif codes == 16 * scales:
            mla_fp4.store_index(rows, expected.view(blocks, -1), slots, per_block)
        else:
            return
    assert torch.equal(pages, expected)


def test_ring_offsets(lib):
    position = torch.cat(
        [
            torch.arange(70000),
            torch.randint(0, 2**62, (30000,)),
            torch.tensor([2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1]),
        ]
    )
    ring = torch.randint(1, 65537, position.shape)
    ring[::7], ring[::11], ring[::13] = 134, 1, 65536
    out = torch.empty_like(position)
    lib.ring_offsets(address(position), address(ring), address(out), *sizes(len(position)))
    assert torch.equal(out, position % ring)


@pytest.mark.parametrize("ring", [1, 2, 7])
@pytest.mark.parametrize("seed", range(6))
def test_compress(lib, ring, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = [0, 1, 2, 5, 0, 17, 1, 8, 0]
    start = torch.randint(0, 50, (len(lengths),), generator=g)
    start[1], start[6] = 4, 9
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    rows, d = int(cu[-1]), 8
    kv, gate = torch.randn(rows, d, generator=g), torch.randn(rows, d, generator=g) * 5
    tail = torch.randn(12, ring, 2, d, generator=g)
    slot = torch.randperm(12, generator=g)[: len(lengths)].int()
    expected_tail = tail.clone()
    with using("reference"):
        expected = mla_fp4.compress(kv, gate, expected_tail, slot, cu, start)
    out = torch.full_like(expected, float("nan"))
    lib.compress(
        address(kv), address(gate), address(tail), address(slot), address(cu), address(start), address(out),
        *sizes(len(lengths), rows, d, ring),
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)
    assert torch.equal(tail, expected_tail)
