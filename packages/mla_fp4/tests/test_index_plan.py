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
    lib.shifted_value.restype = lib.key_factor.restype = ctypes.c_float
    lib.depths.restype = lib.tops.restype = ctypes.c_uint32
    lib.keys_of_block.argtypes, lib.keys_of_block.restype = [ctypes.c_int64] * 4, ctypes.c_int64
    return lib


def scores_of(lib, q, weights, rows, bits=0):
    """float32 [T, keys] of packed index rows [keys, 68]; `bits` below the largest term of a step are kept, 0: all."""
    out = torch.empty(len(q), len(rows))
    codes, scales = rows[:, :64].contiguous(), rows[:, 64:].contiguous()
    pointers = [address(x) for x in (codes, scales, out)]
    lib.score_rows(address(q), address(weights), len(q), q.shape[1], *pointers[:2], len(rows), bits, pointers[2])
    return out


def difference(a, b):
    """DeepGEMM's calc_diff: 1 - 2 sum(a b) / sum(a^2 + b^2)."""
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def exact_scores(q, weights, rows):
    q = formats.dequantize_index(formats.quantize_index(q)).double()
    dots = torch.einsum("thd,kd->thk", q, formats.dequantize_index(rows).double())
    return (dots.relu() * weights.double().unsqueeze(-1)).sum(1), dots.abs()


VALUES = formats.decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()


def test_every_code_in_every_place(lib):
    out = (ctypes.c_float * 8)()
    for depth in (0, 3, 14):
        for place in range(8):
            for code in range(16):
                lib.key_values(ctypes.c_uint32(code << 4 * place), depth, out)
                assert list(out) == [VALUES[code] * 2.0 ** (6 - depth) if i == place else 0 for i in range(8)]


def test_codes_are_exact_down_to_14_binades_and_then_round(lib):
    for depth in range(30):
        for code in range(16):
            exact, got = VALUES[code] * 2.0 ** (6 - depth), lib.shifted_value(code, depth)
            if depth <= 14:
                assert got == exact
            else:
                assert got * 512 == round(exact * 512)  # both round to even


def test_factor_and_depths_of_a_key(lib):
    values = formats.decode_ue8m0(torch.arange(256, dtype=torch.uint8)).tolist()
    for byte in range(255):
        assert lib.key_factor(byte) == values[byte]
    assert lib.key_factor(255) != lib.key_factor(255)
    for top, own in ((0, 0), (255, 0), (255, 254), (130, 120), (19, 0), (18, 0)):
        for other_top, other in ((0, 0), (255, 0), (200, 190)):
            got = lib.depths(top | other_top << 16, own | other << 16)
            assert (got & 0xFFFF, got >> 16) == (min(top - own, 19), min(other_top - other, 19))
            got = lib.tops(top | other << 16, own | other_top << 16)
            assert (got & 0xFFFF, got >> 16) == (top, other_top)


def test_images_and_head_order_are_permutations(lib):
    for heads in (8, 32, 64):
        assert {lib.image_byte(h, c) for h in range(heads) for c in range(128)} == set(range(heads * 128))
        assert {lib.head_of(lane, i) for lane in range(4) for i in range(heads // 4)} == set(range(heads))
        for lane in range(4):
            for i in range(heads // 4):
                assert lib.weight_place(lib.head_of(lane, i), heads) == lane * (heads // 4) + i


def test_keys_of_a_block_fill_the_device(lib):
    for tiles in (1, 7, 64, 512, 10_000):
        for width in (1, 64, 70_000, 1 << 20):
            for places in (264, 396):
                keys = lib.keys_of_block(tiles, width, places, 256)
                assert 256 <= keys <= 8192 and keys % 256 == 0
    for tiles, width in ((64, 65_536), (512, 65_536), (1, 1 << 20), (3, 500_000)):
        blocks = tiles * -(-width // lib.keys_of_block(tiles, width, 396, 256))
        assert blocks / (-(-blocks // 396) * 396) > 0.8


@pytest.mark.parametrize("heads", [1, 4, 8, 20, 32, 33, 64])
def test_scores_are_those_of_the_reference(lib, heads):
    q, weights = torch.randn(5, heads, 128), torch.randn(5, heads)
    rows = formats.quantize_index(torch.randn(70, 128) * torch.logspace(-3, 3, 4, 2).repeat_interleave(32))
    got = scores_of(lib, q, weights, rows)
    exact, dots = exact_scores(q, weights, rows)
    bound = (dots * weights.abs().double().unsqueeze(-1)).sum(1) * 2.0**-22 + 1e-4 * 2.0**-10
    assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("spread", [0, 3, 12])
def test_bits_of_the_tensor_unit_are_enough(lib, spread):
    """Scores whose steps keep 13 bits below their largest term, for scales 2^spread apart: bound 5e-6."""

    def rows_of(*shape):
        scales = torch.exp2(torch.randint(-spread, spread + 1, (*shape[:-1], 4)).float())
        return torch.randn(shape) * scales.repeat_interleave(32, dim=-1)

    q, weights, rows = rows_of(4, 32, 128), torch.randn(4, 32), formats.quantize_index(rows_of(200, 128))
    got, (exact, _) = scores_of(lib, q, weights, rows, bits=13), exact_scores(q, weights, rows)
    assert difference(got.double(), exact) < 1e-7


def test_groups_far_apart_in_one_head(lib):
    """What vanishes is small next to the product of the largest values of the query's head and of the key."""
    q = torch.randn(6, 32, 128) * torch.tensor([1.0, 2.0**-20, 2.0**-13, 2.0**-30]).repeat_interleave(32)
    q[1, :, :32] = 0  # nothing of the largest group
    q[2] = 0
    q[3, 5] = 0
    rows = formats.quantize_index(torch.randn(40, 128) * torch.tensor([2.0**-30, 1, 4, 2.0**10]).repeat_interleave(32))
    weights = torch.rand(6, 32)
    exact, _ = exact_scores(q, weights, rows)
    got = scores_of(lib, q, weights, rows)
    largest = (q.abs().amax(-1) * weights).sum(1, keepdim=True) * formats.dequantize_index(rows).abs().amax(-1)
    assert ((got - exact).abs() <= largest * 64 * 2.0**-17).all() and (got[2] == 0).all()


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
