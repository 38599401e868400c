"""Index scores on a GPU: the host's run of the same arithmetic, up to the tensor unit's sums, and the reference."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing.host import address, host_library
from mla_fp4.reference.indexer import select_top

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PACKAGE = Path(__file__).parents[2]
POISON = -12345.0


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    return host_library(
        PACKAGE / "tests/host/index_plan.cpp", tmp_path_factory.mktemp("index"), PACKAGE / "csrc/cuda/sm90"
    )


def index_score(case, *, candidates=None, candidate_block=8, maxima=False, fill=False, bf16=False, width=None):
    """scores [T, width] and maxima [T, width / 8] on the CPU; POISON where nothing was written."""
    cuda = importlib.import_module("mla_fp4._cuda")
    on = {name: value.cuda() if torch.is_tensor(value) else value for name, value in case.items()}
    q = on["q"].bfloat16() if bf16 else on["q"]
    rows, heads, _ = q.shape
    if width is None:
        width = max(1, int(case["visible"].max())) if candidates is None else candidates.shape[1] * candidate_block
    ids = None if candidates is None else candidates.cuda()
    scores = torch.full((rows, width + 3), POISON, device="cuda")
    tops = torch.full((rows, -(-width // 8) + 1), POISON, device="cuda")
    workspace = torch.full((cuda.index_score_workspace(rows, heads),), 255, dtype=torch.uint8, device="cuda")
    cu = case["cu_seqlens"]
    cuda.index_score(
        q=q.data_ptr(),
        weights=on["head_weights"].data_ptr(),
        q_is_bf16=bf16,
        rows=rows,
        heads=heads,
        pages=on["pages"].data_ptr(),
        blocks=on["pages"].shape[0],
        rows_per_block=case["rows_per_block"],
        block_table=on["block_table"].data_ptr(),
        table_width=on["block_table"].shape[1],
        cu_seqlens=on["cu_seqlens"].data_ptr(),
        batch=len(cu) - 1,
        visible=on["visible"].data_ptr(),
        longest_request=int((cu[1:] - cu[:-1]).max()),
        width=width,
        candidates=0 if ids is None else ids.data_ptr(),
        candidates_width=0 if ids is None else ids.shape[1],
        candidate_block=candidate_block,
        scores=scores.data_ptr(),
        stride=scores.stride(0),
        fill_hidden=fill,
        maxima=tops.data_ptr() if maxima else 0,
        maxima_stride=tops.stride(0),
        workspace=workspace.data_ptr(),
        stream=torch.cuda.current_stream().cuda_stream,
    )
    assert (scores[:, width:] == POISON).all()
    return scores[:, :width].cpu(), tops.cpu()


def keys_of(case, request, count):
    """Packed rows [count, 68] of a request's first keys."""
    size = case["rows_per_block"]
    pages = case["pages"][case["block_table"][request, : -(-count // size)].long()]
    return formats.index_page_rows(pages, size).flatten(0, 1)[:count].contiguous()


def expected(lib, case):
    """The host's scores, POISON where a row does not see a position."""
    cu, visible = case["cu_seqlens"].tolist(), case["visible"]
    out = torch.full((len(visible), max(1, int(visible.max()))), POISON)
    for b, (first, end) in enumerate(itertools.pairwise(cu)):
        count = int(visible[first:end].max()) if end > first else 0
        if not count:
            continue
        rows = keys_of(case, b, count)
        codes, scales = rows[:, :64].contiguous(), rows[:, 64:].contiguous()
        q, weights = case["q"][first:end].contiguous(), case["head_weights"][first:end].contiguous()
        part = torch.empty(end - first, count)
        lib.score_rows(
            *(address(q), address(weights), end - first, q.shape[1]),
            *(address(codes), address(scales), count, 0, address(part)),
        )
        hidden = torch.arange(count) >= visible[first:end].unsqueeze(1)
        out[first:end, :count] = part.masked_fill(hidden, POISON)
    return out


def assert_close(got, wanted, largest=1e-3):
    """The same places written; errors far below 5e-6 of calc_diff, and no single one above `largest` rms."""
    hidden = wanted == POISON
    assert torch.equal(got == POISON, hidden)
    a, b = got[~hidden].double(), wanted[~hidden].double()
    assert 1 - 2 * (a * b).sum() / (a * a + b * b).sum() < 1e-7
    assert (a - b).abs().max() <= largest * b.square().mean().sqrt()


RAGGED = ([1, 0, 2, 9, 1, 40], [0, 1, 63, *range(120, 129), 1000, *range(500, 540)])


@pytest.mark.parametrize("heads", [1, 4, 8, 20, 32, 64])
@pytest.mark.parametrize("rows_per_block", [16, 64, 128])
def test_has_the_scores_of_the_host_and_the_reference(lib, index_case, heads, rows_per_block):
    """Every key that nobody sees, and every block that nobody uses, holds NaN bytes."""
    case = index_case(*RAGGED, heads=heads, dim=128, rows_per_block=rows_per_block)
    got, _ = index_score(case)
    assert_close(got, expected(lib, case))
    with using("reference"):
        reference = mla_fp4.index_scores(**case)
    assert_close(got, torch.where(reference > -torch.inf, reference, POISON))


def test_sums_of_few_bits_are_exact_on_this_device(lib, index_case):
    """The largest codes next to the smallest, under one scale: multiples of 1/4 below 2^10."""
    case = index_case([2], [256, 256], heads=32, dim=128)
    case["q"] = torch.where(torch.rand(2, 32, 128) < 0.5, 6.0, 0.5) * torch.randn(2, 32, 128).sign()
    case["q"][..., ::32] = 6
    pages = case["pages"][case["block_table"][0, :4].long()]
    pages[:, : 64 * 64] = torch.tensor([0x77, 0x71, 0x17, 0x1F, 0xF9], dtype=torch.uint8)[
        torch.randint(0, 5, (4, 64 * 64))
    ]
    case["pages"][case["block_table"][0, :4].long()] = pages
    assert torch.equal(index_score(case)[0], expected(lib, case))


def test_groups_far_apart_in_one_head(lib, index_case):
    case = index_case([1, 12], [300] * 13, heads=32, dim=128)
    case["q"] *= torch.tensor([1.0, 2.0**-20, 2.0**-13, 2.0**-30]).repeat_interleave(32)
    case["q"][1, :, :32] = 0
    case["q"][2] = 0
    assert_close(index_score(case)[0], expected(lib, case))


@pytest.mark.parametrize("spread", [3, 6])
def test_scales_apart(lib, index_case, spread):
    """Groups of queries and keys 2^(2 spread) apart: the tensor unit has to cut."""
    case = index_case([1, 12], [300] * 13, heads=32, dim=128)
    case["q"] *= torch.exp2(torch.randint(-spread, spread + 1, (13, 32, 4)).float()).repeat_interleave(32, dim=-1)
    scales = case["pages"][:, 64 * 64 :]
    moved = scales + torch.randint(-spread, spread + 1, scales.shape).to(torch.uint8)
    case["pages"][:, 64 * 64 :] = torch.where(scales < 200, moved, scales)
    # Measured on an H200: the largest error is 1.06e-3 rms for spread 3 and 1.3e-3 rms for spread 6.
    assert_close(index_score(case)[0], expected(lib, case), largest=2e-3)


def test_bfloat16_queries(lib, index_case):
    case = index_case([2, 20], [100] * 22, heads=32, dim=128)
    case["q"] = case["q"].bfloat16().float()
    assert_close(index_score(case, bf16=True)[0], expected(lib, case))


def test_hidden_positions_become_minus_infinity(index_case):
    case = index_case(*RAGGED, heads=8, dim=128)
    plain, _ = index_score(case)
    filled, _ = index_score(case, fill=True)
    assert torch.equal(filled, torch.where(plain == POISON, -torch.inf, plain))


@pytest.mark.parametrize("heads", [8, 32])
def test_nan_stays_where_it_is(index_case, heads):
    case = index_case([3], [100, 100, 100], heads=heads, dim=128)
    clean, _ = index_score(case)
    case["pages"][case["block_table"][0, 0].long(), 64 * 64 + 7 * 4 + 1] = 255
    case["q"][1, 0, 3] = torch.nan
    got, tops = index_score(case, maxima=True)
    assert got[:, 7].isnan().all() and got[1].isnan().all()
    keep = torch.arange(100) != 7
    assert torch.equal(got[[0, 2]][:, keep], clean[[0, 2]][:, keep])
    assert (tops[1, :13] == -torch.inf).all() and tops[0, 0] == clean[0, :7].max()


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_block_maxima(index_case, heads):
    case = index_case(*RAGGED, heads=heads, dim=128)
    scores, tops = index_score(case, maxima=True)
    for row, visible in enumerate(case["visible"].tolist()):
        for block in range(tops.shape[1]):
            part = scores[row, block * 8 : min(block * 8 + 8, visible)]
            assert tops[row, block] == (part.max() if len(part) else POISON)


@pytest.mark.parametrize("rows_per_block", [16, 32, 64, 256])
def test_pages_of_any_size_have_the_same_scores(index_case, rows_per_block):
    """Small pages take other copies; one and many rows of a request other kernels."""
    lengths, visible = [1, 20, 3], [9000, *range(8000, 8020), 5000, 5001, 1]
    case = index_case(lengths, visible, heads=32, dim=128, rows_per_block=rows_per_block)
    other = index_case(lengths, visible, heads=32, dim=128, rows_per_block=128)
    keys = formats.index_page_rows(other["pages"], 128).flatten(0, 1)
    for b, count in enumerate((9000, 8019, 5001)):
        positions = torch.arange(count)
        rows = keys[other["block_table"][b, positions // 128].long() * 128 + positions % 128]
        for i in range(-(-count // rows_per_block)):
            part = rows[i * rows_per_block : (i + 1) * rows_per_block]
            codes, scales = formats.split_index_page(case["pages"][int(case["block_table"][b, i])], rows_per_block)
            codes[: len(part)], scales[: len(part)] = part[:, :64], part[:, 64:]
    case["q"], case["head_weights"] = other["q"], other["head_weights"]
    assert torch.equal(index_score(case)[0], index_score(other)[0])


@pytest.mark.parametrize("block", [4, 8])
def test_candidates_have_the_scores_of_their_positions(index_case, block):
    case = index_case([1, 3], [900, 1000, 999, 1001], heads=32, dim=128)
    whole, _ = index_score(case)
    candidates = torch.full((4, 160), -1, dtype=torch.int32)
    for row, count in enumerate((0, 1, 120, 77)):
        candidates[row, :count] = torch.randperm(1001 // block + 1)[:count].sort().values.int()
    got, _ = index_score(case, candidates=candidates, candidate_block=block)
    positions = (candidates.long().unsqueeze(-1) * block + torch.arange(block)).flatten(1)
    inside = (candidates >= 0).repeat_interleave(block, dim=1) & (positions < case["visible"].unsqueeze(1))
    gathered = whole.gather(1, positions.clamp(0, whole.shape[1] - 1))
    assert torch.equal(got, torch.where(inside, gathered, POISON))


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_a_row_alone_equals_it_in_a_chunk(index_case, take_rows, heads):
    """Few rows and many rows of a request are two kernels."""
    rows = 40
    case = index_case([rows], [3000 + 7 * i for i in range(rows)], heads=heads, dim=128)
    whole, _ = index_score(case)
    for part in (slice(0, 1), slice(17, 18), slice(31, 36), slice(5, 40)):
        alone, _ = index_score(take_rows(case, part))
        assert torch.equal(alone, whole[part, : alone.shape[1]])
    for _ in range(20):
        assert torch.equal(index_score(case)[0], whole)
    assert torch.equal(index_score(case, width=100_000)[0][:, : whole.shape[1]], whole)


def test_table_entries_outside_of_the_pool_are_not_followed(index_case):
    case = index_case([1], [130], heads=8, dim=128)
    case["block_table"][0, 1] = 2**31 - 1
    assert (index_score(case)[0][0, 64:128] == 0).all()


def test_nothing_visible_and_no_rows(index_case):
    assert (index_score(index_case([2], [0, 0], heads=8, dim=128))[0] == POISON).all()


def index_topk(case, k, score_bytes, candidates=None, block=8):
    """int32 [T, k] on the CPU, with a workspace for so many bytes of scores."""
    cuda = importlib.import_module("mla_fp4._cuda")
    on = {name: value.cuda() if torch.is_tensor(value) else value for name, value in case.items()}
    rows, heads, _ = on["q"].shape
    width = max(1, int(case["visible"].max())) if candidates is None else candidates.shape[1] * block
    ids = None if candidates is None else candidates.cuda()
    cu = case["cu_seqlens"]
    size = cuda.index_topk_workspace(rows, heads, width, k, score_bytes)
    workspace = torch.full((size + 64,), 255, dtype=torch.uint8, device="cuda")
    out = torch.full((rows, k), -7, dtype=torch.int32, device="cuda")
    cuda.index_topk(
        q=on["q"].data_ptr(),
        weights=on["head_weights"].data_ptr(),
        q_is_bf16=False,
        rows=rows,
        heads=heads,
        pages=on["pages"].data_ptr(),
        blocks=on["pages"].shape[0],
        rows_per_block=case["rows_per_block"],
        block_table=on["block_table"].data_ptr(),
        table_width=on["block_table"].shape[1],
        cu_seqlens=on["cu_seqlens"].data_ptr(),
        batch=len(cu) - 1,
        visible=on["visible"].data_ptr(),
        longest_request=int((cu[1:] - cu[:-1]).max()),
        width=width,
        candidates=0 if ids is None else ids.data_ptr(),
        candidates_width=0 if ids is None else ids.shape[1],
        candidate_block=block,
        k=k,
        out=out.data_ptr(),
        workspace=workspace.data_ptr(),
        workspace_bytes=size,
        stream=torch.cuda.current_stream().cuda_stream,
    )
    assert (workspace[size:] == 255).all()
    return out.cpu()


@pytest.mark.parametrize("k", [4, 512, 2048])
def test_positions_without_all_scores_at_once(index_case, k):
    """Whole, by groups of rows, by pieces of positions: the same as scores and then a selection; ties included."""
    lengths, visible = [1, 0, 300, 7], [30_000, *range(100, 400), *[25_000, 24_999, 3, 4096, 4097, 12_288, 0]]
    case = index_case(lengths, visible, heads=8, dim=128)
    case["q"] = case["q"].round()  # few different scores
    for row in (0, 305):  # these have ties
        case["head_weights"][row] = 0
    scores, _ = index_score(case)
    wanted = select_top(scores.masked_fill(scores == POISON, -torch.inf), case["visible"], k)
    for score_bytes in (1 << 28, 280 * 4 * 30_000, 1 << 24, 1 << 20, (k + 4096) * 4):
        assert torch.equal(index_topk(case, k, score_bytes), wanted), score_bytes


def test_candidate_positions_by_groups_of_rows(index_case):
    case = index_case([1, 300], [900, *range(600, 900)], heads=32, dim=128)
    candidates = torch.full((301, 80), -1, dtype=torch.int32)
    for row in range(301):
        count = row % 81
        candidates[row, :count] = torch.randperm(112)[:count].sort().values.int()
    wanted = index_topk(case, 64, 1 << 28, candidates)
    assert torch.equal(index_topk(case, 64, 270 * 640 * 4, candidates), wanted)
    scores, _ = index_score(case, candidates=candidates)
    for row in (0, 1, 80, 81, 300):
        seen = (scores[row] != POISON).nonzero().squeeze(1)
        best = seen[scores[row, seen].topk(min(64, len(seen))).indices]
        positions = candidates[row, best // 8] * 8 + best % 8
        assert wanted[row, : len(best)].tolist() == positions.sort().values.tolist()


@pytest.mark.parametrize("change", [{"rows_per_block": 48}, {"rows_per_block": 8}, {"q": torch.zeros(1, 65, 128)}])
def test_wrong_arguments_are_refused(index_case, change):
    with pytest.raises(ValueError):
        index_score(index_case([1], [10], heads=8, dim=128) | change)
