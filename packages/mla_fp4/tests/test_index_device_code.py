"""The GPU kernels' own code, run by host threads: what threads exchange, index and store, not what they race for."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernel_core import formats
from kernel_core.testing.host import address, host_library
from mla_fp4.reference.indexer import select_top

HERE = Path(__file__).parent
INCLUDES = (HERE.parent / "csrc/cuda/sm90", HERE / "host/stub")
POISON = -12345.0


@pytest.fixture(scope="module")
def selection(tmp_path_factory):
    return host_library(HERE / "host/topk_threads.cpp", tmp_path_factory.mktemp("topk"), *INCLUDES)


@pytest.fixture(scope="module")
def scoring(tmp_path_factory):
    lib = host_library(HERE / "host/index_threads.cpp", tmp_path_factory.mktemp("index"), *INCLUDES)
    lib.workspace_bytes.argtypes, lib.workspace_bytes.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    return lib


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return host_library(HERE / "host/index_plan.cpp", tmp_path_factory.mktemp("plan"), *INCLUDES)


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "random": torch.randn,
    "ascending": lambda n: torch.arange(n).float(),
    "equal": lambda n: torch.full((n,), 2.5),
    "zeros": lambda n: (torch.randn(n) - 2).relu(),
    "nan": lambda n: torch.where(torch.rand(n) < 0.7, torch.nan, torch.randn(n)),
    "mostly nan": lambda n: torch.where(torch.rand(n) < 0.99, torch.nan, torch.randn(n)),
    "mostly one value": lambda n: torch.where(torch.rand(n) < 0.9, 0.5, torch.randn(n)),
    "common from the middle on": lambda n: torch.randn(n).clamp(max=1.5) * (torch.arange(n) > n // 2) - 1,
    "few values": lambda n: torch.randint(-3, 4, (n,)).float(),
    "one block": lambda n: torch.randn(n) + 9 * (torch.arange(n) // 700 == 3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k", "wide"), [(2, 1, 0), (513, 512, 0), (17_001, 512, 0), (17_001, 2048, 1), (40_003, 512, 1)]
)
def test_selection(selection, kind, n, k, wide):
    memory = torch.full(((n + 3) // 4 * 4,), float("nan"))
    memory[:n] = KINDS[kind](n)
    out = torch.full((1, k), -1, dtype=torch.int32)
    assert selection.select_row(address(memory), n, k, bool(wide), address(out)) == min(n, k)
    assert torch.equal(out, select_top(memory[:n].unsqueeze(0), torch.tensor([n]), k))


def run(lib, case, keys=512, candidates=None, block=8, variant=0, fill=False):
    rows, heads, _ = case["q"].shape
    cu = case["cu_seqlens"]
    width = int(case["visible"].max()) if candidates is None else candidates.shape[1] * block
    scores, maxima = torch.full((rows, width + 1), POISON), torch.full((rows, -(-width // 8)), POISON)
    workspace = torch.full((lib.workspace_bytes(rows, heads) + 16,), 255, dtype=torch.uint8)
    sizes = (rows, heads, len(case["pages"]), case["rows_per_block"], case["block_table"].shape[1], len(cu) - 1)
    more = (int((cu[1:] - cu[:-1]).max()), width, 0 if candidates is None else candidates.shape[1], block)
    numbers = torch.tensor([*sizes, *more, scores.stride(0), maxima.stride(0), keys, variant, fill])
    names = ("q", "head_weights", "pages", "block_table", "cu_seqlens", "visible")
    lib.index_score(
        *[address(case[name]) for name in names],
        None if candidates is None else address(candidates),
        address(scores),
        address(maxima) if candidates is None else None,
        address(workspace),
        address(numbers),
    )
    assert (scores[:, width] == POISON).all()
    return scores[:, :width], maxima


def expected(plan, case, request, row):
    """The scores of one row, by the arithmetic alone."""
    count = int(case["visible"][row])
    pages = case["pages"][case["block_table"][request, : -(-count // case["rows_per_block"])].long()]
    rows = formats.index_page_rows(pages, case["rows_per_block"]).flatten(0, 1)[:count]
    codes, scales, out = rows[:, :64].contiguous(), rows[:, 64:].contiguous(), torch.empty(count)
    q, weights = case["q"][row].contiguous(), case["head_weights"][row].contiguous()
    plan.score_rows(
        address(q), address(weights), 1, q.shape[0], address(codes), address(scales), count, 0, address(out)
    )
    return out


@pytest.mark.parametrize(("heads", "rows_per_block"), [(4, 16), (8, 64), (20, 128), (32, 64), (64, 64)])
def test_scores_and_maxima(scoring, plan, index_case, heads, rows_per_block):
    """What nobody sees holds NaN bytes, and ids behind the used ones are garbage."""
    lengths, visible = [1, 0, 2, 9], [0, 1, 700, *range(120, 129)]
    case = index_case(lengths, visible, heads=heads, dim=128, rows_per_block=rows_per_block)
    case["q"][1, :, :32] *= 2.0**-20  # vanishes
    scores, maxima = run(scoring, case)
    for row, (request, count) in enumerate(zip([0, 2, 2, *[3] * 9], visible, strict=True)):
        assert torch.equal(scores[row, :count], expected(plan, case, request, row))
        assert (scores[row, count:] == POISON).all()
        tops = [part.max() for part in scores[row, :count].split(8) if len(part)]
        assert maxima[row].tolist() == tops + [POISON] * (maxima.shape[1] - len(tops))


@pytest.mark.parametrize(("lengths", "rows_per_block"), [([1, 1], 64), ([1, 1], 128), ([2], 256), ([5], 64), ([2], 32)])
def test_many_stages(scoring, plan, index_case, lengths, rows_per_block):
    """Longer than all stages of a warpgroup, several times; ends inside a stage's first or second tile."""
    rows = sum(lengths)
    case = index_case(
        lengths, [1990, 1900][:rows] + [1000] * (rows - 2), heads=8, dim=128, rows_per_block=rows_per_block
    )
    scores, _ = run(scoring, case, keys=2048)
    for row, count in enumerate(case["visible"].tolist()):
        request = row if len(lengths) > 1 else 0
        assert torch.equal(scores[row, :count], expected(plan, case, request, row))


@pytest.mark.parametrize("variant", [3, 4, 5, 6])
@pytest.mark.parametrize(("heads", "rows_per_block"), [(8, 64), (32, 64), (32, 128), (64, 256)])
def test_one_row_of_a_request_has_the_same_bits_in_every_variant(scoring, index_case, variant, heads, rows_per_block):
    """Scores, maxima and what is not written; pages that are not there; scales far apart."""
    lengths, visible = [1, 1, 0, 1, 1], [1990, 0, 64, 700]
    case = index_case(lengths, visible, heads=heads, dim=128, rows_per_block=rows_per_block)
    case["block_table"][0, 1], case["block_table"][4, 0] = -1, 2**31 - 1
    scales = case["pages"][:, 64 * rows_per_block :]
    moved = (scales.int() + torch.randint(-12, 13, scales.shape)).clamp(1, 254).to(torch.uint8)
    case["pages"][:, 64 * rows_per_block :] = torch.where(scales < 200, moved, scales)
    for keys, fill in ((512, False), (1024, True), (2048, False)):
        wanted = run(scoring, case, keys=keys, fill=fill)
        got = run(scoring, case, keys=keys, fill=fill, variant=variant)
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_candidates(scoring, index_case):
    case = index_case([1, 2], [300, 290, 301], heads=32, dim=128)
    whole, _ = run(scoring, case)
    candidates = torch.full((3, 40), -1, dtype=torch.int32)
    for row, count in enumerate((0, 1, 38)):
        candidates[row, :count] = torch.randperm(38)[:count].sort().values.int()
    got, _ = run(scoring, case, candidates=candidates)
    positions = (candidates.long().unsqueeze(-1) * 8 + torch.arange(8)).flatten(1)
    inside = (candidates >= 0).repeat_interleave(8, dim=1) & (positions < case["visible"].unsqueeze(1))
    assert torch.equal(got, torch.where(inside, whole.gather(1, positions.clamp(0, 300)), POISON))


def test_nan_and_foreign_pages(scoring, index_case):
    case = index_case([2], [100, 140], heads=8, dim=128)
    clean, _ = run(scoring, case)
    case["pages"][case["block_table"][0, 0].long(), 64 * 64 + 7 * 4 + 1] = 255
    case["block_table"][0, 1] = 2**31 - 1
    got, maxima = run(scoring, case)
    assert got[:, 7].isnan().all() and (got[1, 64:128] == 0).all()
    assert torch.equal(got[:, :7], clean[:, :7]) and torch.equal(got[1, 128:], clean[1, 128:])
    assert torch.equal(maxima[:, 0], clean[:, :7].amax(1))
