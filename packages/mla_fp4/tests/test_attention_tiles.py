"""The GPU attention's arithmetic on the host: tiles, which key is where, decoding, the running softmax, a whole row."""

import ctypes
import math
from pathlib import Path

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing import assert_close
from kernel_core.testing.host import address, host_library

HERE = Path(__file__).parent
TILE, WINDOW_TILES = 64, 2
SMALL = 2.0**-8  # tiles hold so much of a key


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    library = host_library(
        HERE / "host" / "attention_tiles.cpp", tmp_path_factory.mktemp("attention"), HERE.parent / "csrc"
    )
    u32, u64, i64, i32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32
    f32, flag, where = ctypes.c_float, ctypes.c_bool, ctypes.c_void_p
    for name, arguments, result in (
        ("k_major", [u32], u64),
        ("mn_major", [u32, u32], u64),
        ("advance", [u64, u32], u64),
        ("swizzle128", [u32, u32], u32),
        ("swizzle128_offset", [u32], u32),
        ("piece", [i32] * 4, u32),
        ("tiles_of", [i64], i32),
        ("heads_of_cta", [i64] * 3, i64),
        ("main_columns", [where, where, where, i64], None),
        ("window_columns", [where, where, flag, where, i64], None),
        ("through_tile", [where, flag, where], None),
        ("walk", [*4 * [i64], i32, *2 * [i64], where, i64, where, *3 * [i64], where, where], None),
        ("softmax_step", [*4 * [f32], where], None),
        ("factor", [f32] * 3, f32),
        (
            "attend",
            [
                where,
                *4 * [i64],
                i32,
                i64,
                *2 * [where],
                i64,
                where,
                *2 * [i64],
                *2 * [where, i64],
                *2 * [where],
                f32,
                where,
            ],
            i32,
        ),
        ("fits", [i32, i64], flag),
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


def test_pieces_of_a_tile(lib):
    """Every 16 bytes are written once, where products look for them, and eight keys at a time meet all banks."""
    pieces = [(q, u, w) for q in range(4) for u in range(4) for w in range(4)]
    at = {(key, *p): lib.piece(key, *p) for key in range(TILE) for p in pieces}
    assert sorted(at.values()) == list(range(0, TILE * 1024, 16))
    for (key, q, u, w), found in at.items():
        column = 128 * q + 32 * u + 8 * w
        assert found == column // 64 * 8192 + lib.swizzle128(key, column % 64 * 2)
    for first in range(0, TILE, 8):
        assert all(len({at[first + k, *p] // 16 % 8 for k in range(8)}) == 8 for p in pieces)


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


@pytest.mark.parametrize("selected", [0, 1, 63, 64, 65, 512])
@pytest.mark.parametrize("window", [1, 100, 128])
@pytest.mark.parametrize("rows_per_block", [64, 48])
def test_every_key_in_its_place(lib, selected, window, rows_per_block):
    g = torch.Generator().manual_seed(selected + window)
    ring_rows, slot, blocks, width = 134, 3, 40, 24
    table = torch.randperm(blocks, generator=g)[:width].int()
    table[5], table[6] = -7, 2**31 - 1  # entries no index may follow
    tiles = WINDOW_TILES + math.ceil(selected / TILE)
    assert lib.tiles_of(selected) == tiles
    for start, offset, lower in (
        (0, 0, 0),
        (0, 200, 0),
        (500, 3, 0),
        (500, 3, 470),
        (90, 40, 100),
        (7, 0, 99),
        (2**31 - 300, 299, 5),  # the last position there is
    ):
        first_row = 11
        row, position = first_row + offset, start + offset
        indices = torch.randint(0, width * rows_per_block, (selected,), generator=g).int()
        indices[torch.rand(selected, generator=g) < 0.3] = -1
        indices[:1] = 2**31 - 1
        indices[1:2] = width * rows_per_block  # just beyond the table
        expected = []
        for i in range(WINDOW_TILES * TILE):
            key = position - window + 1 + i
            if i >= window or key < max(0, lower):
                expected.append((-1, -1))
            elif key < start:
                expected.append((0, (slot * ring_rows + key % ring_rows) * 528))
            else:
                expected.append((1, (first_row + key - start) * 528))
        for i in range((tiles - WINDOW_TILES) * TILE):
            index = int(indices[i]) if i < selected else -1
            block = int(table[index // rows_per_block]) if 0 <= index < width * rows_per_block else -1
            found = 0 <= block < blocks
            expected.append((2, (block * rows_per_block + index % rows_per_block) * 288) if found else (-1, -1))
        kind, source = torch.full((tiles * TILE,), 9).int(), torch.zeros(tiles * TILE, dtype=torch.int64)
        batch = (row, first_row, start, lower, slot, window, ring_rows)
        pool = (address(indices), selected, address(table), width, rows_per_block, blocks)
        lib.walk(*batch, *pool, address(kind), address(source))
        assert list(zip(kind.tolist(), source.tolist(), strict=True)) == expected


def same(actual, expected):
    """Equal bits of bfloat16, signs of zeros included; any NaN equals any other."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert torch.equal(actual.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


def test_main_keys_are_decoded_exactly(lib):
    """Every code at every place under every scale of either half: 2^-8 of the value, without rounding; NaN scales."""
    scale, turn, other = torch.meshgrid(torch.arange(256), torch.arange(16), torch.tensor([0x38, 0x7F]), indexing="ij")
    scale, turn, other = scale.flatten(), turn.flatten(), other.flatten()
    codes = ((turn[:, None] + torch.arange(32)) % 16).to(torch.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
    for first in (True, False):
        low, high = (scale, other) if first else (other, scale)
        pair = (low | high << 8).to(torch.uint16)
        out = torch.empty(len(scale), 32, dtype=torch.bfloat16)
        lib.main_columns(address(packed), address(pair), address(out), len(scale))
        scales = torch.stack((low, high), 1).to(torch.uint8).repeat_interleave(16, 1)
        exact = formats.decode_e2m1(codes).double() * formats.decode_e4m3(scales).double() * SMALL
        assert torch.equal(exact.bfloat16().double().nan_to_num(9), exact.nan_to_num(9))
        same(out, exact.bfloat16())


@pytest.mark.parametrize("mixed", [False, True])
def test_window_keys_are_decoded_exactly(lib, mixed):
    """Every code under every scale: 2^-8 of the value. Only values below 2^-118 lose bits, rounded once.

    An encoder writes NaN codes only under the NaN scale; under another one they are not told from 480.
    """
    scale, turn = torch.meshgrid(torch.arange(256), torch.arange(0, 256), indexing="ij")
    scale, turn = scale.flatten().to(torch.uint8), turn.flatten()
    codes = ((turn[:, None] + 37 * torch.arange(32)) % 256).to(torch.uint8)
    out = torch.empty(len(scale), 32, dtype=torch.bfloat16)
    lib.window_columns(address(codes), address(scale), mixed, address(out), len(scale))
    values = formats.decode_e4m3(codes).double() * formats.decode_ue8m0(scale).double()[:, None]
    lost = ((values * SMALL).bfloat16().double() != values * SMALL) & ~values.isnan()
    assert lost.any() and (values[lost].abs() < 2.0**-118).all()
    unknown = ((codes & 0x7F) == 0x7F) & (scale != 255)[:, None]
    same(out.masked_fill(unknown, 0), (values * SMALL).bfloat16().masked_fill(unknown, 0))
    assert (out[unknown].float().abs() >= 480 * 2.0**-127 * SMALL).all()


@pytest.mark.parametrize("main", [True, False])
def test_keys_through_a_tile(lib, main):
    """64 rows by the producer's pieces, read as products read them; no row, zeros."""
    values = torch.randn(TILE, 512) * torch.logspace(-3, 3, TILE)[:, None]
    rows = (formats.quantize_main if main else formats.quantize_window)(values)
    rows[17] = 0  # how a missing key arrives
    out = torch.empty(TILE, 512, dtype=torch.bfloat16)
    lib.through_tile(address(rows), main, address(out))
    expected = (formats.dequantize_main if main else formats.dequantize_window)(rows)
    assert torch.equal(out.float(), expected * SMALL) and (out[17] == 0).all()


def test_steps_of_the_softmax(lib):
    def step(reference, top, product=0.0, scale=1.0):
        out = torch.empty(3)
        lib.softmax_step(reference, top, product, scale, address(out))
        return out.tolist()

    # the reference stays until it is behind by more than 8; sums shrink by as much as it moves
    assert step(3.0, 11.0)[:2] == [3.0, 1.0] and step(3.0, -50.0)[:2] == [3.0, 1.0]
    assert step(3.0, 12.0)[:2] == [12.0, 2.0**-9]
    assert step(-math.inf, -500.0)[:2] == [-500.0, 0.0]  # the first key, whatever its score
    assert step(-math.inf, -math.inf) == [-math.inf, 1.0, 1.0]  # no key yet; its scores are -inf:
    assert step(-math.inf, -math.inf, -math.inf)[2] == step(3.0, 3.0, -math.inf)[2] == 0.0
    assert step(3.0, math.nan)[:2] == [3.0, 1.0] and math.isnan(step(3.0, 3.0, math.nan)[2])
    # weights reach 2^8
    assert step(3.0, 11.0, 22.0, 0.5)[2] == 256.0 and step(3.0, 4.0, 8.0, 0.25)[2] == 0.5


def test_the_last_factor(lib):
    inf = math.inf
    assert lib.factor(5.0, 4.0, -inf) == 0.25 and lib.factor(5.0, 3.0, 5.0) == 0.25
    assert lib.factor(5.0, 4.0, 7.0) == 0.25 / (1 + 1)  # the sink is the larger one: 4 / 4 + 1
    assert lib.factor(5.0, 4.0, inf) == 0.0 and lib.factor(-inf, 0.0, inf) == 0.0
    assert lib.factor(-inf, 0.0, 3.0) == 0.0 and lib.factor(-inf, 0.0, -inf) == 0.0
    assert lib.factor(-900.0, 2.0, 900.0) == 0.0 and lib.factor(900.0, 2.0, -900.0) == 0.5
    assert math.isnan(lib.factor(0.0, math.nan, 0.0))


def row_case(selected, *, start=300, offset=2, lower=0, window=128, holes=0.2, heads=3, seed=0):
    """A request of `offset` + 1 new rows; the last one attends."""
    g = torch.Generator().manual_seed(seed)
    rows, visible = offset + 1, max(1, 2 * selected)
    width = -(-visible // 64)
    indices = torch.full((rows, selected), -1, dtype=torch.int32)
    indices[-1] = torch.randperm(visible, generator=g)[:selected].int()
    indices[-1, torch.rand(selected, generator=g) < holes] = -1

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    return {
        "q": normal(rows, heads, 512).bfloat16().float(),
        "new_rows": formats.quantize_window(normal(rows, 512)),
        "ring": formats.quantize_window(normal(4, 134, 512)),
        "ring_slot": torch.tensor([2]).int(),
        "cu_seqlens": torch.tensor([0, rows]).int(),
        "start_pos": torch.tensor([start]),
        "lower": torch.tensor([lower]),
        "window": window,
        "pages": formats.quantize_main(normal(width + 3, 64, 512)),
        "rows_per_block": 64,
        "block_table": torch.randperm(width + 3, generator=g)[None, :width].int(),
        "indices": indices,
        "sink": normal(heads),
        "rope": normal(rows, 64),
        "scale": 512**-0.5,
    }


def attend(lib, case):
    """The last row by the kernels' arithmetic, [heads, 512], and how often the references of its heads moved."""
    heads, last = case["q"].shape[1], case["q"].shape[0] - 1
    q, rope, indices = (case[name][last].contiguous() for name in ("q", "rope", "indices"))
    out = torch.full((heads, 512), torch.nan)
    moves = lib.attend(
        address(q), heads, last, int(case["start_pos"]), int(case["lower"]), int(case["ring_slot"]), case["window"],
        address(case["new_rows"]), address(case["ring"]), case["ring"].shape[1], address(case["pages"]),
        case["pages"].shape[0], 64, address(case["block_table"]), case["block_table"].shape[1], address(indices),
        len(indices), address(case["sink"]), address(rope), case["scale"], address(out),
    )  # fmt: skip
    return out, moves


def expected(case):
    with using("reference"):
        return mla_fp4.sparse_attention(**case)[-1]


def check(lib, case):
    out, moves = attend(lib, case)
    assert_close(out, expected(case), atol=6e-3, rtol=2.01 / 128, max_diff=5e-6)
    return out, moves


@pytest.mark.parametrize("selected", [0, 1, 65, 512])
@pytest.mark.parametrize("place", [{}, {"start": 0, "offset": 40}, {"lower": 250}, {"window": 77}, {"holes": 0.9}])
def test_a_row(lib, selected, place):
    check(lib, row_case(selected, **place))


@pytest.mark.parametrize("value", [-math.inf, math.inf, 300.0, -300.0])
@pytest.mark.parametrize("selected", [0, 65])
def test_sinks(lib, value, selected):
    case = row_case(selected)
    case["sink"][1] = value
    out, _ = check(lib, case)
    assert (out[1] == 0).all() == (value > 0)


@pytest.mark.parametrize("sink", [0.3, -math.inf, math.inf])
def test_a_row_without_keys(lib, sink):
    case = row_case(65, lower=10_000, holes=1.0)
    case["sink"][:] = sink
    out, moves = check(lib, case)
    assert (out == 0).all() and moves == 0


def test_tiles_without_keys_change_nothing(lib):
    """A tile of holes in between keeps the row's sums: without two of them the bits are the same."""
    case = row_case(TILE * 4, holes=0.0)
    case["indices"][-1, TILE : 3 * TILE] = -1
    whole, _ = attend(lib, case)
    short = {**case, "indices": torch.cat((case["indices"][:, :TILE], case["indices"][:, 3 * TILE :]), 1).contiguous()}
    check(lib, case)
    assert torch.equal(attend(lib, short)[0], whole)


@pytest.mark.parametrize("factor", [12, 60])
def test_references_that_have_to_move(lib, factor):
    """Sharp queries and keys in the order of their scores: every tile is far above the last one."""
    case = row_case(512, holes=0.0, heads=1, lower=10_000)
    case["q"] *= factor
    rows = formats.dequantize_main(case["pages"])[case["block_table"][0].long()].flatten(0, 1)
    scores = rows[case["indices"][-1].long()] @ case["q"][-1, 0]
    case["indices"][-1] = case["indices"][-1][scores.argsort()]
    _, moves = check(lib, case)
    assert moves >= (2 if factor == 12 else 5)
    case["indices"][-1] = case["indices"][-1].flip(0)
    _, fewer = check(lib, case)
    assert fewer < moves


def test_a_nan_key_stays_and_a_missing_one_does_not(lib):
    case = row_case(65, holes=0.0)
    block, row = case["block_table"][0, case["indices"][-1, 7] // 64], case["indices"][-1, 7] % 64
    case["pages"][block, row, 256:] = 0x7F  # its scales
    assert attend(lib, case)[0].isnan().all()
    case["indices"][-1, 7] = -1
    check(lib, case)


def test_heads_of_a_cta(lib):
    for rows in (1, 2, 3, 7, 8, 16, 17, 32, 33, 66, 67, 131, 132, 133, 1000):
        for heads in (1, 4, 8, 9, 16, 17, 24, 32, 40, 63, 64, 65, 96, 128, 192):
            for processors in (1, 78, 132):
                group = lib.heads_of_cta(rows, heads, processors)
                assert group in (8, 16, 32, 64)
                assert group < 64 or heads % 64 == 0  # what the wide kernel takes
                items = rows * -(-heads // group)
                # more rows never make groups smaller; smaller ones only where all of them run at once
                assert group <= lib.heads_of_cta(rows + 1, heads, processors)
                largest = lib.heads_of_cta(1 << 20, heads, processors)
                assert group <= largest and (group == largest or items <= processors)
                if group > 8:  # 64 heads go to groups of eight or stay together
                    assert rows * -(-heads // (8 if heads % 64 == 0 else group // 2)) > processors
    many = {1: 8, 8: 8, 9: 16, 17: 32, 63: 32, 64: 64, 65: 32, 128: 64}
    assert {heads: lib.heads_of_cta(1 << 20, heads, 132) for heads in many} == many
    assert [lib.heads_of_cta(rows, 64, 132) for rows in (1, 16, 17, 33, 67)] == [8, 8, 64, 64, 64]
    assert [lib.heads_of_cta(rows, 32, 132) for rows in (1, 33, 34, 66, 67)] == [8, 8, 16, 16, 32]


def test_arguments_that_do_not_fit(lib):
    sizes = ("rows", "heads", "batch", "slots", "ring_rows", "window", "selected", "blocks", "rows_per_block",
             "table_width", "scale", "q", "no indices")  # fmt: skip
    numbers = {name: i for i, name in enumerate(sizes)}
    assert lib.fits(-1, 0)
    for name, good in (
        ("rows", 0), ("heads", 1), ("heads", 65), ("ring_rows", 128), ("window", 1), ("selected", 0), ("blocks", 0),
        ("table_width", 0), ("rows_per_block", 48), ("q", 16), ("no indices", 0),
    ):  # fmt: skip
        assert lib.fits(numbers[name], good), (name, good)
    for name, bad in (
        ("rows", -1), ("rows", 1 << 31), ("heads", 0), ("batch", 0), ("slots", 0), ("slots", 1 << 31), ("window", 0),
        ("ring_rows", 127), ("window", 129), ("selected", -1), ("selected", 1 << 20), ("blocks", -1),
        ("blocks", 1 << 27), ("rows_per_block", 0), ("table_width", -1), ("scale", 0), ("scale", -1), ("q", 8),
        ("no indices", 1),
    ):  # fmt: skip
        assert not lib.fits(numbers[name], bad), (name, bad)
