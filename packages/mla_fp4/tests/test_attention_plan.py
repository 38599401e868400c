"""The GPU attention's arithmetic on the host: descriptors, swizzle, which key is where, decoding, the merge."""

import ctypes
import math
from pathlib import Path

import pytest
import torch

from kernel_core import formats
from kernel_core.attention import attend as oracle
from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.host import address, host_library

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    library = host_library(
        HERE / "host" / "attention_plan.cpp", tmp_path_factory.mktemp("attention"), HERE.parent / "csrc"
    )
    u32, u64, i64, where = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p
    for name, arguments, result in (
        ("k_major", [u32], u64),
        ("mn_major", [u32, u32], u64),
        ("advance", [u64, u32], u64),
        ("swizzle128", [u32, u32], u32),
        ("swizzle128_offset", [u32], u32),
        ("workspace_floats", [i64] * 4, i64),
        (
            "walk",
            [*4 * [i64], ctypes.c_int32, *2 * [i64], where, i64, where, *3 * [i64], *2 * [ctypes.c_int], *3 * [where]],
            None,
        ),
        ("decode_tile", [where, ctypes.c_bool, ctypes.c_int, where], None),
        ("tile_value", [where, ctypes.c_int, ctypes.c_int, ctypes.c_int], ctypes.c_uint16),
        ("attend", [where, where, where, ctypes.c_int, ctypes.c_float, ctypes.c_float, ctypes.c_bool, where], None),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def test_descriptor_fields(lib):
    d = lib.k_major(0x31400)
    assert (d & 0x3FFF, d >> 16 & 0x3FFF, d >> 32 & 0x3FFF, d >> 49 & 7, d >> 62) == (0x3140, 1, 64, 0, 1)
    d = lib.mn_major(0x10000, 8192)
    assert (d & 0x3FFF, d >> 16 & 0x3FFF, d >> 32 & 0x3FFF, d >> 62) == (0x1000, 512, 64, 1)
    assert lib.advance(lib.k_major(1024), 32) == lib.k_major(1024 + 32)
    assert lib.advance(lib.mn_major(1024, 8192), 65536 + 2048) == lib.mn_major(1024 + 65536 + 2048, 8192)


def test_swizzle(lib):
    """Both spellings agree, it is a permutation, and eight rows at one piece meet eight bank columns."""
    seen = set()
    for row in range(64):
        for byte in range(128):
            at = lib.swizzle128(row, byte)
            assert at == lib.swizzle128_offset(row * 128 + byte)
            seen.add(at)
    assert seen == set(range(64 * 128))
    for piece in range(8):
        for first in range(0, 64, 8):
            assert len({lib.swizzle128(first + r, piece * 16) // 16 % 8 for r in range(8)}) == 8


def test_staged_rows_meet_no_bank_conflict(lib):
    for unit in range(18):
        for first in (0, 8):
            main = {(row * 18 + lib.staged_main(row, unit)) % 8 for row in range(first, first + 8)}
            assert len(main) == 8
    assert all({lib.staged_main(row, unit) for unit in range(18)} == set(range(18)) for row in range(16))
    assert all(len({(row * 17 + unit) % 8 for row in range(8)}) == 8 for unit in range(17))


def test_accumulators_cover_the_tile(lib):
    cells = {
        (lib.accumulator_row(t) + i // 2 * 8, 8 * j + lib.accumulator_column(t) + i % 2)
        for t in range(128)
        for j in range(8)
        for i in range(4)
    }
    assert cells == {(row, column) for row in range(64) for column in range(64)}


def read_by(descriptor, major, outer, k):
    """Where a product finds 16-bit element (outer, k) of an operand: the canonical layouts of the 128-byte swizzle."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if major == "k":
        at = start + outer // 8 * stride + outer % 8 * 128 + 2 * k
    else:
        at = start + k // 8 * stride + k % 8 * 128 + outer // 64 * leading + outer % 64 * 2
    return at ^ (at >> 7 & 7) << 4


def test_products_read_the_tile_both_ways(lib):
    """Every step of Q K^T and of P V, by the kernels' descriptors, finds the keys where the producer puts them."""
    base, column_bytes = 0x10000, 64 * 128

    def put(key, column):
        return base + column // 64 * column_bytes + lib.swizzle128(key, column % 64 * 2)

    for step in range(32):
        d = lib.advance(lib.k_major(base), step // 4 * column_bytes + step % 4 * 32)
        assert all(read_by(d, "k", n, k) == put(n, 16 * step + k) for n in range(64) for k in range(16))
    for block in range(8):
        for step in range(4):
            d = lib.advance(lib.mn_major(base + block * column_bytes, column_bytes), step * 2048)
            assert all(
                read_by(d, "mn", n, k) == put(16 * step + k, 64 * block + n) for n in range(64) for k in range(16)
            )
    d = lib.mn_major(base, column_bytes)  # 256 columns at once, as a wider product would
    assert all(read_by(d, "mn", n, k) == put(k, n) for n in range(256) for k in range(16))


@pytest.mark.parametrize("selected", [0, 1, 128, 129, 512])
@pytest.mark.parametrize("window", [1, 100, 128])
def test_every_key_once_and_in_its_place(lib, selected, window):
    g = torch.Generator().manual_seed(selected + window)
    ring_rows, slot, rows_per_block, blocks, width = 134, 3, 64, 40, 24
    table = torch.randperm(blocks, generator=g)[:width].int()
    table[5], table[6] = -7, 2**31 - 1  # entries no index may follow
    chunks = 1 + math.ceil(selected / 128)
    for start, offset, lower in (
        (0, 0, 0),
        (0, 200, 0),
        (500, 3, 0),
        (500, 3, 470),
        (90, 40, 100),
        (7, 0, 99),
        (2**40, 1, 5),
    ):
        first_row = 11
        row, position = first_row + offset, start + offset
        indices = torch.randint(0, width * rows_per_block, (selected,), generator=g).int()
        indices[torch.rand(selected, generator=g) < 0.3] = -1
        indices[:1] = 2**31 - 1
        expected = []
        for i in range(128):
            key = position - window + 1 + i
            if i >= window or key < max(0, lower):
                expected.append((-1, -1))
            elif key < start:
                expected.append((0, (slot * ring_rows + key % ring_rows) * 528))
            else:
                expected.append((1, (first_row + key - start) * 528))
        for i in range((chunks - 1) * 128):
            index = int(indices[i]) if i < selected else -1
            block = int(table[index // rows_per_block]) if 0 <= index < width * rows_per_block else -1
            found = 0 <= block < blocks
            expected.append((2, (block * rows_per_block + index % rows_per_block) * 288) if found else (-1, -1))
        for first, count in [(0, chunks)] + [(c, 1) for c in range(chunks)]:
            kind, times = torch.full((count * 128,), 9).int(), torch.zeros(count * 128).int()
            source = torch.zeros(count * 128, dtype=torch.int64)
            batch = (row, first_row, start, lower, slot, window, ring_rows)
            pool = (address(indices), selected, address(table), width, rows_per_block, blocks)
            lib.walk(*batch, *pool, first, count, address(kind), address(source), address(times))
            assert list(zip(kind.tolist(), source.tolist(), strict=True)) == expected[first * 128 :][: count * 128]
            passes = [102 if first == 0 and i < 128 else 101 for i in range(count * 128)]
            assert times.tolist() == passes  # window keys in two halves; each tile is ended once


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize("tile", [0, 1])
def test_decoded_tile(lib, main, tile):
    """64 rows through staging, decoding and swizzle: the values of the reference, bit for bit; no row, zeros."""
    values = torch.randn(64, 512) * torch.logspace(-3, 3, 64)[:, None]
    rows = (formats.quantize_main if main else formats.quantize_window)(values)
    rows[17] = 0  # how a missing key arrives
    image = torch.full((2 * 64 * 512,), 0x7FFF, dtype=torch.int16)
    lib.decode_tile(address(rows), main, tile, address(image))
    expected = (formats.dequantize_main if main else formats.dequantize_window)(rows).bfloat16().view(torch.int16)
    pointer = address(image)
    found = [[lib.tile_value(pointer, tile, key, c) for c in range(512)] for key in range(64)]
    actual = torch.tensor(found, dtype=torch.int32).to(torch.int16)
    expected[17] = 0
    # the sign of a zero code has no meaning
    assert ((actual == expected) | ((actual & 0x7FFF == 0) & (expected & 0x7FFF == 0))).all()
    assert (image.view(2, -1)[1 - tile] == 0x7FFF).all()


def merged(lib, q, keys, seen, sink, split):
    out = torch.full((512,), torch.nan)
    lib.attend(address(q), address(keys), address(seen), keys.shape[0] // 128, sink, 512**-0.5, split, address(out))
    return out


@pytest.mark.parametrize("kind", ["plain", "holes", "empty chunk", "no keys", "sharp"])
@pytest.mark.parametrize("sink", [0.3, -math.inf, math.inf, 300.0, -300.0])
def test_merge(lib, kind, sink):
    """Walking all chunks and merging partial results give the same bits, and those of the model within bfloat16."""
    g = torch.Generator().manual_seed(5)
    keys = formats.dequantize_main(formats.quantize_main(torch.randn(640, 512, generator=g)))
    q = torch.randn(512, generator=g).bfloat16().float() * (12 if kind == "sharp" else 1)
    seen = torch.ones(640, dtype=torch.uint8)
    if kind == "holes":
        seen = (torch.rand(640, generator=g) < 0.6).byte()
    if kind == "empty chunk":
        seen[128:256] = seen[512:] = 0
    if kind == "no keys":
        seen[:] = 0
    keys[seen == 0] = 0
    actual = merged(lib, q, keys, seen, sink, False)
    assert_bitwise(merged(lib, q, keys, seen, sink, True), actual)
    expected = oracle(q[None, None], keys[None], seen.bool()[None], torch.tensor([sink]), torch.empty(1, 0), 512**-0.5)
    assert_close(actual, expected[0, 0], atol=1e-3, rtol=2.01 / 128, max_diff=5e-6)
    if kind == "no keys" or sink == math.inf:
        assert (actual == 0).all()


def test_a_nan_key_stays_and_a_missing_one_does_not(lib):
    keys, q, seen = torch.randn(256, 512), torch.randn(512), torch.ones(256, dtype=torch.uint8)
    keys[200] = torch.nan
    assert merged(lib, q, keys, seen, 0.0, False).isnan().all()
    keys[200], seen[200] = 0, 0
    assert merged(lib, q, keys, seen, 0.0, False).isfinite().all()


def test_workspace(lib):
    assert lib.workspace_floats(3, 64, 512, 0) == lib.workspace_floats(3, 64, 512, 5) == 0
    assert lib.workspace_floats(3, 64, 512, 1) == 3 * 64 * 5 * 516
    assert lib.workspace_floats(3, 64, 0, 1) == 0
