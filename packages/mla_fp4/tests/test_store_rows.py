"""Pages: the bytes of every (block, row, field) land where the readers look for them."""

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing import Guarded, assert_bitwise

BACKENDS = ("native", "reference")


def tagged_rows(count, row_bytes, codes):
    """Every byte names its row and whether it is a code or a scale."""
    rows = torch.arange(count, dtype=torch.int64).unsqueeze(1).repeat(1, row_bytes)
    rows[:, codes:] += 128
    return (rows % 256).to(torch.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dim", "rows_per_block"), [(128, 64), (128, 128), (32, 64), (32, 3)])
def test_index_page_layout_byte_by_byte(backend, dim, rows_per_block):
    code_bytes, scale_bytes = dim // 2, dim // 32
    blocks = 3
    rows = tagged_rows(blocks * rows_per_block, code_bytes + scale_bytes, code_bytes)
    slots = torch.randperm(blocks * rows_per_block)
    pages = Guarded((blocks, rows_per_block * (code_bytes + scale_bytes)), torch.uint8)
    with using(backend):
        mla_fp4.store_index(rows, pages.tensor, slots, rows_per_block)
    pages.check()
    for i, slot in enumerate(slots.tolist()):
        page, offset = pages.tensor[slot // rows_per_block], slot % rows_per_block
        codes = page[offset * code_bytes :][:code_bytes]
        scales = page[rows_per_block * code_bytes + offset * scale_bytes :][:scale_bytes]
        assert (codes == i % 256).all()
        assert (scales == (i + 128) % 256).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_writer_and_reader_share_the_layout(backend):
    keys = torch.randn(2 * 64, 128)
    rows = mla_fp4.kv_rows(keys, None, 1e-6, None, format="index")
    pages = torch.empty(2, 64 * 68, dtype=torch.uint8)
    with using(backend):
        mla_fp4.store_index(rows, pages, torch.arange(128), 64)
    assert_bitwise(formats.index_page_rows(pages, 64).flatten(0, 1), rows)
    # a reader that scores with one-hot queries sees every channel of every key in its place
    q = torch.eye(128).view(1, 128, 128)[:, :32].contiguous() * 4
    scores = mla_fp4.index_scores(
        q,
        torch.eye(32)[:1],
        pages,
        64,
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([128], dtype=torch.int32),
    )
    assert torch.equal(scores[0], formats.dequantize_index(rows)[:, 0].relu() * 4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_main_rows_are_contiguous_and_the_rest_stays(backend, dtype):
    rows = torch.arange(5 * 288).view(5, 288).to(dtype)
    pages = Guarded((3, 4, 288), dtype)
    before = pages.tensor.clone()
    with using(backend):
        mla_fp4.store_main(rows, pages.tensor, torch.tensor([11, -1, 0, 6, -1]))
    pages.check()
    flat, kept = pages.tensor.view(12, 288), before.view(12, 288)
    for slot in range(12):
        if slot in (11, 0, 6):
            assert_bitwise(flat[slot], rows[{11: 0, 0: 2, 6: 3}[slot]])
        else:
            assert_bitwise(flat[slot], kept[slot])


@pytest.mark.parametrize("backend", BACKENDS)
def test_float_index_pages(backend):
    rows, pages = torch.randn(3, 32), torch.zeros(2, 8, 32)
    with using(backend):
        mla_fp4.store_index(rows, pages, torch.tensor([9, -1, 15]), 8)
    assert_bitwise(pages[1, 1], rows[0])
    assert_bitwise(pages[1, 7], rows[2])
    assert pages.count_nonzero() == 64


def test_of_equal_slots_the_last_row_stays():
    rows, pages = torch.arange(3.0).view(3, 1).repeat(1, 4), torch.zeros(1, 2, 4)
    mla_fp4.store_main(rows, pages, torch.tensor([1, 1, 1]))
    assert (pages[0, 1] == 2).all()


def test_offsets_beyond_32_bits():
    """The last row of a pool of 5 GB of untouched memory."""
    pages = torch.empty(140_000, 128, 288, dtype=torch.uint8)
    last = pages.shape[0] * 128 - 1
    rows = torch.full((1, 288), 7, dtype=torch.uint8)
    mla_fp4.store_main(rows, pages, torch.tensor([last]))
    assert (pages[-1, -1] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "pages", "slots", "argument"),
    [
        (torch.zeros(2, 36, dtype=torch.uint8), (2, 4, 36), [0, 8], r"slots\[1\]"),
        (torch.zeros(2, 36, dtype=torch.uint8), (2, 4, 36), [-2, 0], r"slots\[0\]"),
        (torch.zeros(2, 36, dtype=torch.uint8), (2, 4, 36), [0], "slots"),
        (torch.zeros(2, 36, dtype=torch.uint8), (2, 4, 35), [0, 1], "pages"),
        (torch.zeros(2, 36, dtype=torch.int32), (2, 4, 36), [0, 1], "rows"),
    ],
)
def test_bad_main_input_writes_nothing(backend, rows, pages, slots, argument):
    target = torch.full(pages, 9, dtype=torch.uint8)
    with using(backend), pytest.raises(ValueError, match=f"^{argument}: got .*, allowed is "):
        mla_fp4.store_main(rows, target, torch.tensor(slots))
    assert (target == 9).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("width", "page", "slots", "rows_per_block", "argument"),
    [
        (17, 68, [0, 8], 4, r"slots\[1\]"),
        (17, 69, [0, 1], 4, "pages"),
        (18, 72, [0, 1], 4, "rows"),
        (17, 68, [0, 1], 0, "rows_per_block"),
    ],
)
def test_bad_index_input_writes_nothing(backend, width, page, slots, rows_per_block, argument):
    target = torch.full((2, page), 9, dtype=torch.uint8)
    rows = torch.zeros(2, width, dtype=torch.uint8)
    with using(backend), pytest.raises(ValueError, match=f"^{argument}: got .*, allowed is "):
        mla_fp4.store_index(rows, target, torch.tensor(slots), rows_per_block)
    assert (target == 9).all()
