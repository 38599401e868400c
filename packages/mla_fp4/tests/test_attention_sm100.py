"""The SM100 attention kernels' own code on host threads: who waits for whom, where things stand, which bits."""

import ctypes
import math
from pathlib import Path

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.host import address, host_library

HERE = Path(__file__).parent
WINDOW, ROWS_PER_BLOCK = 128, 16
NAMES = ("q", "new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos", "lower")
NAMES += ("pages", "block_table", "indices", "sink", "rope")


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    library = host_library(
        HERE / "host/attention_threads_sm100.cpp",
        tmp_path_factory.mktemp("attention_sm100"),
        HERE.parent / "csrc",
        HERE / "host/stub",
    )
    library.attend_sm100.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_bool]
    return library


def build(lengths, starts, *, heads=64, selected=200, holes=0.2, lower=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows, batch, visible = sum(lengths), len(lengths), max(selected, 40)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    used = -(-visible // ROWS_PER_BLOCK)
    blocks = used * batch + 1
    table = torch.full((batch, used + 1), 2**31 - 1, dtype=torch.int32)
    table[:, :used] = (torch.randperm(blocks - 1, generator=g) + 1).int().view(batch, used)
    indices = torch.stack([torch.randperm(visible, generator=g)[:selected] for _ in range(rows)]).int()
    indices[torch.rand(rows, selected, generator=g) < holes] = -1
    pages = formats.quantize_main(normal(blocks, ROWS_PER_BLOCK, 512))
    pages[0] = 255  # what a missing key reads: NaN scales
    return {
        "q": normal(rows, heads, 512).bfloat16(),
        "new_rows": formats.quantize_window(normal(rows, 512)),
        "ring": formats.quantize_window(normal(batch + 1, WINDOW + 2, 512)),
        "ring_slot": torch.randperm(batch + 1, generator=g)[:batch].int(),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "start_pos": torch.tensor(starts, dtype=torch.int64),
        "lower": torch.tensor(lower or [0] * batch, dtype=torch.int64),
        "pages": pages,
        "block_table": table,
        "indices": indices,
        "sink": normal(heads),
        "rope": normal(rows, 64),
    }


def attend(lib, case, *, pairs=False, splits=0):
    rows, heads, _ = case["q"].shape
    selected = case["indices"].shape[1]
    chunks = 1 + math.ceil(selected / 128)
    guarded = torch.full((rows + 1, heads, 512), 77.0, dtype=torch.bfloat16)
    out = guarded[:rows]
    workspace = torch.full((rows * heads * chunks * 516 + 4,), torch.nan)
    workspace = workspace[-workspace.data_ptr() // 4 % 4 :]
    pointers = torch.tensor([case[name].data_ptr() for name in NAMES] + [out.data_ptr(), workspace.data_ptr()])
    numbers = (rows, heads, len(case["lower"]), *case["ring"].shape[:2], WINDOW, *case["pages"].shape[:2])
    sizes = torch.tensor([*numbers, case["block_table"].shape[1], selected, splits])
    assert lib.attend_sm100(address(pointers), address(sizes), 512**-0.5, pairs) == 0
    assert (guarded[rows] == 77).all()
    return out.clone()


def check(actual, case):
    with using("reference"):
        expected = mla_fp4.sparse_attention(
            **{**case, "q": case["q"].float()}, window=WINDOW, rows_per_block=ROWS_PER_BLOCK, scale=512**-0.5
        )
    assert_close(actual.float(), expected, atol=5e-3, rtol=2.01 / 128, max_diff=5e-6)


@pytest.mark.parametrize(("selected", "holes"), [(0, 0.0), (5, 0.2), (200, 0.2), (300, 1.0)])
def test_one_cta(lib, selected, holes):
    """Window keys of the ring and of this step, chunks with no key, a list that ends inside a tile."""
    case = build([2], [150], selected=selected, holes=holes)
    whole = attend(lib, case)
    check(whole, case)
    assert_bitwise(attend(lib, case, splits=1), whole)


def test_a_pair_of_ctas(lib):
    case = build([1, 1], [3, 500], heads=128, selected=260, lower=[0, 450])
    whole = attend(lib, case, pairs=True)
    check(whole, case)
    assert_bitwise(attend(lib, case, pairs=False), whole)  # the host's products add alike in both
    assert_bitwise(attend(lib, case, pairs=True, splits=1), whole)
    assert_bitwise(attend(lib, case, pairs=True, splits=2), whole)


@pytest.mark.parametrize("heads", [8, 70])
def test_any_number_of_heads(lib, heads):
    case = build([1], [70], heads=heads, selected=130)
    whole = attend(lib, case)
    check(whole, case)
    assert_bitwise(attend(lib, case, splits=1), whole)


def test_a_row_depends_on_itself(lib):
    case = build([2, 1], [40, 7], selected=140)
    whole = attend(lib, case)
    one = {**case, **{n: case[n][2:] for n in ("q", "new_rows", "indices", "rope")}}
    one |= {n: case[n][1:] for n in ("start_pos", "lower", "ring_slot", "block_table")}
    one["cu_seqlens"] = torch.tensor([0, 1], dtype=torch.int32)
    assert_bitwise(attend(lib, {n: t.clone() for n, t in one.items()}), whole[2:])


def test_no_keys_and_sinks(lib):
    case = build([1], [0], selected=3, holes=1.0, lower=[9])
    case["sink"][0], case["sink"][1] = math.inf, -math.inf
    assert (attend(lib, case) == 0).all()


def test_a_nan_row_shows_and_a_missing_one_does_not(lib):
    case = build([1], [150], selected=40, holes=0.0)
    block, offset = (
        case["block_table"][0, case["indices"][0, 7] // ROWS_PER_BLOCK],
        case["indices"][0, 7] % ROWS_PER_BLOCK,
    )
    case["pages"][block, offset] = 255
    assert attend(lib, case).isnan().any()
    case["indices"][0, 7] = -1
    check(attend(lib, case), case)
