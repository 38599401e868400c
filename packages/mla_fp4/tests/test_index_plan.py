"""The GPU scores' arithmetic on the host: operands, exact sums, scales, the order of heads."""

import ctypes
from pathlib import Path

import pytest
import torch

import mla_fp4
from kernel_core import formats
from kernel_core.testing.host import address, host_library

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    lib = host_library(
        HERE / "host" / "index_plan.cpp", tmp_path_factory.mktemp("index"), HERE.parent / "csrc/cuda/sm90"
    )
    lib.folded_value.restype = lib.fold_factor.restype = ctypes.c_float
    lib.keys_of_block.argtypes, lib.keys_of_block.restype = [ctypes.c_int64] * 3, ctypes.c_int64
    return lib


def scores_of(lib, q, weights, rows):
    """float32 [T, keys] of packed index rows [keys, 68]."""
    out = torch.empty(len(q), len(rows))
    codes, scales = rows[:, :64].contiguous(), rows[:, 64:].contiguous()
    lib.score_rows(
        address(q), address(weights), len(q), q.shape[1], address(codes), address(scales), len(rows), address(out)
    )
    return out


def exact_scores(q, weights, rows):
    q = formats.dequantize_index(formats.quantize_index(q)).double()
    dots = torch.einsum("thd,kd->thk", q, formats.dequantize_index(rows).double())
    return (dots.relu() * weights.double().unsqueeze(-1)).sum(1), dots.abs()


def test_every_code_in_every_place(lib):
    out = (ctypes.c_float * 8)()
    values = formats.decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()
    for place in range(8):
        for code in range(16):
            lib.key_values(ctypes.c_uint32(code << 4 * place), out)
            assert [v * 64 for v in out] == [values[code] if i == place else 0 for i in range(8)]


def test_scales_of_a_key(lib):
    out = (ctypes.c_float * 4)()
    values = formats.decode_ue8m0(torch.arange(256, dtype=torch.uint8)).tolist()
    for place in range(4):
        for byte in range(255):
            lib.key_scales(ctypes.c_uint32(0x80808080 ^ (0x80 ^ byte) << 8 * place), out)
            assert list(out) == [values[byte] if i == place else 2.0 for i in range(4)]
        lib.key_scales(ctypes.c_uint32(0x00FE0001 | 255 << 8 * place), out)
        assert out[0] != out[0]
    lib.key_scales(ctypes.c_uint32(0xFEFEFEFE), out)
    assert list(out) == [2.0**127] * 4


def test_folded_codes_are_exact(lib):
    values = formats.decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()
    for shift in range(-8, 7):
        for code in range(16):
            assert lib.folded_value(code, shift) == values[code] * 2.0**shift


def test_shift_and_factor_make_up_the_scale(lib):
    for top in (1, 60, 127, 254):
        for scale in range(max(1, top - 100), top + 1):
            assert 2.0 ** lib.fold_shift(scale, top) * lib.fold_factor(scale, top) == 2.0 ** (scale - top + 6)
            assert -8 <= lib.fold_shift(scale, top) <= 6
            assert (lib.fold_factor(scale, top) == 1) == (top - scale <= 14)


def test_pieces_of_a_group_meet_all_banks(lib):
    assert {lib.key_piece(r, g) for r in range(16) for g in range(4)} == set(range(64))
    for group in range(4):
        for first in (0, 8):
            words = [lib.key_piece(first + lane // 4, group) * 4 + lane % 4 for lane in range(32)]
            assert len({word % 32 for word in words}) == 32


def test_images_and_head_order_are_permutations(lib):
    for heads in (8, 32, 64):
        assert {lib.image_byte(h, c) for h in range(heads) for c in range(128)} == set(range(heads * 128))
        assert {lib.head_of(lane, i) for lane in range(4) for i in range(heads // 4)} == set(range(heads))


def test_keys_of_a_block_are_whole_tiles(lib):
    for tiles in (1, 7, 64, 10_000):
        for width in (1, 64, 70_000, 1 << 20):
            assert lib.keys_of_block(tiles, width, 132) in (512, 1024, 2048, 4096)


@pytest.mark.parametrize("heads", [1, 4, 8, 20, 32, 33, 64])
def test_scores_are_those_of_the_reference(lib, heads):
    q, weights = torch.randn(5, heads, 128), torch.randn(5, heads)
    rows = formats.quantize_index(torch.randn(70, 128) * torch.logspace(-3, 3, 4, 2).repeat_interleave(32))
    got = scores_of(lib, q, weights, rows)
    exact, dots = exact_scores(q, weights, rows)
    bound = (dots * weights.abs().double().unsqueeze(-1)).sum(1) * 2.0**-22 + 1e-4 * 2.0**-10
    assert ((got - exact).abs() <= bound).all()


def test_groups_far_apart_in_one_head(lib):
    q = torch.randn(6, 32, 128) * torch.tensor([1.0, 2.0**-20, 2.0**-13, 2.0**-30]).repeat_interleave(32)
    q[1, :, :32] = 0  # nothing of the largest group
    q[2] = 0
    q[3, 5] = 0
    rows = formats.quantize_index(torch.randn(40, 128) * torch.tensor([2.0**-30, 1, 4, 2.0**10]).repeat_interleave(32))
    weights = torch.rand(6, 32)
    exact, _ = exact_scores(q, weights, rows)
    got = scores_of(lib, q, weights, rows)
    assert torch.allclose(got.double(), exact, rtol=2e-5, atol=0) and (got[2] == 0).all()


def test_small_integers_are_exact(lib):
    q, keys = torch.randint(-4, 5, (4, 32, 128)).float(), torch.randint(-4, 5, (50, 128)).float()
    q[..., ::32] = keys[:, ::32] = 6  # every scale is 1
    q[q.abs() == 5] = keys[keys.abs() == 5] = 4
    weights, rows = torch.randint(-4, 5, (4, 32)).float(), formats.quantize_index(keys)
    assert torch.equal(scores_of(lib, q, weights, rows).double(), exact_scores(q, weights, rows)[0])


def test_the_op_and_the_kernel_choose_alike(lib, index_case):
    case = index_case([3], [300, 301, 302], heads=32, dim=128)
    rows = formats.index_page_rows(case["pages"][case["block_table"][0, :5].long()], 64).flatten(0, 1)[:302]
    got, op = scores_of(lib, case["q"], case["head_weights"], rows.contiguous()), mla_fp4.index_scores(**case)
    seen = op > -torch.inf
    assert torch.allclose(got[seen], op[seen], rtol=1e-5, atol=1e-4)


def test_nan_stays_where_it_is(lib):
    q, weights = torch.randn(3, 32, 128), torch.randn(3, 32)
    rows = formats.quantize_index(torch.randn(20, 128))
    clean = scores_of(lib, q, weights, rows)
    rows[7, 65] = 255
    q[1, 3, 40] = torch.nan
    got = scores_of(lib, q, weights, rows)
    assert got[1].isnan().all() and got[:, 7].isnan().all()
    keep = torch.arange(20) != 7
    assert torch.equal(got[0, keep], clean[0, keep]) and torch.equal(got[2, keep], clean[2, keep])


def test_sums_of_a_step_fit_the_tensor_unit(lib):
    """Multiples of 1/4 up to 32 products of 6 and 6: 13 bits, while the unit keeps 14."""
    assert 32 * 36 * 4 < 1 << 13
