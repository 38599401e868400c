"""The SM100 scoring kernels' own code on host threads, and the descriptors that its products use."""

import ctypes
from pathlib import Path

import pytest
import torch

from kernel_core import formats
from kernel_core.testing.host import address, host_library

HERE = Path(__file__).parent
POISON = -12345.0


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    library = host_library(
        HERE / "host/index_threads_sm100.cpp",
        tmp_path_factory.mktemp("index_sm100"),
        HERE.parent / "csrc",
        HERE / "host/stub",
    )
    u32, u64, i64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64
    for name, arguments, result in (
        ("workspace_bytes", [i64, i64], i64),
        ("k_major", [u32], u64),
        ("mn_major", [u32, u32], u64),
        ("k_major_64", [u32], u64),
        ("scale_source", [u32], u64),
        ("advance", [u64, u32], u64),
        ("swizzle64", [u32, u32], u32),
        ("bf16_product", [u32, u32, ctypes.c_int, ctypes.c_int], u32),
        ("mxf4_product", [u32, u32, u32], u32),
        ("scale_byte", [u32], u32),
        ("keys_of_block", [i64] * 3, i64),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def fields(d):
    return (d & 0x3FFF) << 4, (d >> 16 & 0x3FFF) << 4, (d >> 32 & 0x3FFF) << 4, d >> 46 & 7, d >> 49 & 0xFFF, d >> 61


def test_shared_memory_descriptors(lib):
    """Fields by the table of the instruction set: address, leading, stride, constant 1, zeros, swizzle."""
    assert fields(lib.k_major(0x31400)) == (0x31400, 16, 1024, 1, 0, 2)
    assert fields(lib.mn_major(0x10000, 8192)) == (0x10000, 8192, 1024, 1, 0, 2)
    assert fields(lib.k_major_64(0x2000)) == (0x2000, 16, 512, 1, 0, 4)
    assert fields(lib.scale_source(0x600)) == (0x600, 0, 128, 1, 0, 0)
    assert lib.advance(lib.k_major(1024), 32) == lib.k_major(1024 + 32)


def test_instruction_descriptors(lib):
    d = lib.bf16_product(128, 256, 0, 1)
    assert (d & 15, d >> 4 & 3, d >> 7 & 7, d >> 10 & 7) == (0, 1, 1, 1)  # dense, float32 sums, bfloat16 operands
    assert (d >> 13 & 15, d >> 17 & 63, d >> 23 & 1, d >> 24 & 31, d >> 29) == (8, 32, 0, 8, 0)
    for half in (0, 1):
        d = lib.mxf4_product(128, 64, half)
        assert (d & 15, d >> 4 & 3, d >> 7 & 7, d >> 10 & 3, d >> 12 & 31) == (0, 2 * half, 1, 1, 0)
        assert (d >> 17 & 63, d >> 23 & 1, d >> 24 & 7, d >> 27 & 3, d >> 29 & 3, d >> 31) == (8, 1, 0, 1, 2 * half, 0)


def test_swizzle_and_scale_order(lib):
    places = [lib.swizzle64(row, byte) for row in range(128) for byte in range(64)]
    assert sorted(places) == list(range(128 * 64))
    assert all(place == n ^ (n >> 7 & 3) << 4 for n, place in enumerate(places))
    for first in range(0, 128, 8):  # eight rows at one piece: no two of them in a bank, twice
        assert len({lib.swizzle64(first + r, 16) // 16 % 8 for r in range(8)}) == 8
    assert sorted(lib.scale_byte(i) for i in range(128)) == list(range(0, 512, 4))
    assert [lib.scale_byte(i) for i in (1, 32, 97)] == [16, 4, 28]


def test_keys_of_a_block(lib):
    for tiles in (1, 7, 64, 10_000):
        for width in (1, 64, 70_000, 1 << 20):
            assert lib.keys_of_block(tiles, width, 148) in (512, 1024, 2048, 4096, 8192)


def run(lib, case, *, keys=512, groups=1, candidates=None, block=8, fill=False, part=(0, 2**62, 0)):
    rows, heads, _ = case["q"].shape
    cu = case["cu_seqlens"]
    width = int(case["visible"].max()) if candidates is None else candidates.shape[1] * block
    scores, maxima = torch.full((rows, width + 1), POISON), torch.full((rows, -(-width // 8)), POISON)
    workspace = torch.full((lib.workspace_bytes(rows, heads) + 16,), 255, dtype=torch.uint8)
    sizes = (rows, heads, len(case["pages"]), case["rows_per_block"], case["block_table"].shape[1], len(cu) - 1)
    more = (int((cu[1:] - cu[:-1]).max()), width, 0 if candidates is None else candidates.shape[1], block)
    numbers = torch.tensor([*sizes, *more, scores.stride(0), maxima.stride(0), keys, groups, int(fill), *part])
    lib.index_score(
        *[address(case[n]) for n in ("q", "head_weights", "pages", "block_table", "cu_seqlens", "visible")],
        None if candidates is None else address(candidates),
        address(scores),
        address(maxima) if candidates is None else None,
        address(workspace),
        address(numbers),
    )
    assert (scores[:, width] == POISON).all()
    return scores[:, :width], maxima


def expected(case, request, row):
    """float64 scores of one row of queries in MXFP4, and how far float32 sums may be from them."""
    count = int(case["visible"][row])
    pages = case["pages"][case["block_table"][request, : -(-count // case["rows_per_block"])].long()]
    keys = formats.dequantize_index(formats.index_page_rows(pages, case["rows_per_block"]).flatten(0, 1)[:count])
    dots = formats.dequantize_index(formats.quantize_index(case["q"][row])).double() @ keys.double().T
    weights = case["head_weights"][row].double().unsqueeze(1)
    return (dots.relu() * weights).sum(0), (dots.abs() * weights.abs()).sum(0) * 2.0**-20 + 1e-30


@pytest.mark.parametrize(("heads", "rows_per_block", "groups"), [(4, 16, 1), (8, 64, 2), (20, 128, 2), (64, 64, 8)])
def test_scores_and_maxima(lib, index_case, heads, rows_per_block, groups):
    """What nobody sees holds NaN bytes, and ids behind the used ones are garbage."""
    visible = [0, 1, 700, *range(120, 129)]
    case = index_case([1, 0, 2, 9], visible, heads=heads, dim=128, rows_per_block=rows_per_block)
    scores, maxima = run(lib, case, groups=groups)
    for row, (request, count) in enumerate(zip([0, 2, 2, *[3] * 9], visible, strict=True)):
        exact, bound = expected(case, request, row)
        assert ((scores[row, :count] - exact).abs() <= bound).all()
        assert (scores[row, count:] == POISON).all()
        tops = [part.max() for part in scores[row, :count].split(8) if len(part)]
        assert maxima[row].tolist() == tops + [POISON] * (maxima.shape[1] - len(tops))


def test_no_launch_parameter_shows(lib, index_case):
    """More keys than stages, whole groups of queries or one at a time: the same bits; hidden ones filled."""
    case = index_case([1, 3], [1500, 1400, 1399, 1300], heads=64, dim=128)
    one, _ = run(lib, case, keys=2048)
    for keys, groups in ((512, 1), (2048, 8)):
        other, maxima = run(lib, case, keys=keys, groups=groups, fill=True)
        assert torch.equal(torch.where(one == POISON, -torch.inf, one), other)
        assert torch.equal(maxima[0], torch.stack([part.max() for part in other[0].split(8)]))


def test_a_part_of_rows_and_positions(lib, index_case):
    case = index_case([2, 3], [400, 390, 500, 490, 10], heads=8, dim=128)
    whole, maxima = run(lib, case)
    part, tops = run(lib, case, part=(1, 4, 192))
    expected = torch.full_like(part, POISON)
    expected[:3, : 500 - 192] = whole[1:4, 192:]
    assert torch.equal(part, expected)
    assert torch.equal(tops[:3, : 63 - 24], maxima[1:4, 24:])


def test_candidates(lib, index_case):
    case = index_case([1, 2], [300, 290, 301], heads=32, dim=128)
    whole, _ = run(lib, case)
    candidates = torch.full((3, 40), -1, dtype=torch.int32)
    for row, count in enumerate((0, 1, 38)):
        candidates[row, :count] = torch.randperm(38)[:count].sort().values.int()
    got, _ = run(lib, case, candidates=candidates)
    positions = (candidates.long().unsqueeze(-1) * 8 + torch.arange(8)).flatten(1)
    inside = (candidates >= 0).repeat_interleave(8, dim=1) & (positions < case["visible"].unsqueeze(1))
    assert torch.equal(got, torch.where(inside, whole.gather(1, positions.clamp(0, 300)), POISON))


def test_nan_and_foreign_pages(lib, index_case):
    case = index_case([2], [100, 140], heads=8, dim=128)
    clean, _ = run(lib, case)
    case["pages"][case["block_table"][0, 0].long(), 64 * 64 + 7 * 4 + 1] = 255
    case["block_table"][0, 1] = 2**31 - 1
    got, maxima = run(lib, case)
    assert got[:, 7].isnan().all() and (got[1, 64:128] == 0).all()
    assert torch.equal(got[:, :7], clean[:, :7]) and torch.equal(got[1, 128:], clean[1, 128:])
    assert torch.equal(maxima[:, 0], clean[:, :7].amax(1))
