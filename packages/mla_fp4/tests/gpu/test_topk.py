"""The selection on a GPU: exactly the reference's, whatever the launch."""

from __future__ import annotations

import importlib

import pytest
import torch

from mla_fp4.reference.indexer import publish_blocks, select_top

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def topk(scores, lengths, k, *, slices=1, blocks=None, block=1, keep_last=False, width=None):
    """int32 [rows, k] on the CPU. `scores` may be wider than `width`; its row stride is kept."""
    cuda = importlib.import_module("mla_fp4._cuda")
    rows = scores.shape[0]
    guard = 64
    out = torch.full((rows * k + guard,), -7, dtype=torch.int32, device="cuda")
    workspace = torch.full((max(16, cuda.topk_workspace(rows, k, slices)),), 255, dtype=torch.uint8, device="cuda")
    cuda.topk(
        scores=scores.data_ptr(),
        stride=scores.stride(0) if rows else 4,
        lengths=lengths.data_ptr(),
        rows=rows,
        width=scores.shape[1] if width is None else width,
        k=k,
        out=out.data_ptr(),
        blocks=0 if blocks is None else blocks.data_ptr(),
        blocks_width=0 if blocks is None else blocks.shape[1],
        block=block,
        keep_last=keep_last,
        workspace=workspace.data_ptr(),
        slices=slices,
        stream=torch.cuda.current_stream().cuda_stream,
    )
    result = out.cpu()
    assert (result[rows * k :] == -7).all()
    return result[: rows * k].view(rows, k)


def padded(scores, fill=float("nan")):
    """The same rows in memory whose stride is a multiple of 4, with `fill` behind each."""
    rows, n = scores.shape
    wide = torch.full((rows, (n + 3) // 4 * 4 + 4), fill, device="cuda")
    wide[:, :n] = scores
    return wide


KINDS = {
    "random": lambda r, n: torch.randn(r, n),
    "ascending": lambda r, n: torch.arange(n).float().repeat(r, 1),
    "descending": lambda r, n: -torch.arange(n).float().repeat(r, 1),
    "equal": lambda r, n: torch.full((r, n), 2.5),
    "zeros": lambda r, n: (torch.randn(r, n) - 2).relu(),
    "few values": lambda r, n: torch.randint(-1, 2, (r, n)).float(),
    "nan": lambda r, n: torch.where(torch.rand(r, n) < 0.7, torch.nan, torch.randn(r, n)),
    "infinite": lambda r, n: torch.where(torch.rand(r, n) < 0.3, -torch.inf, torch.randn(r, n)),
    "close": lambda r, n: 1 + torch.randint(0, 40, (r, n)) * 2.0**-23,
    "end": lambda r, n: (torch.arange(n) >= n - n // 3).float().repeat(r, 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3, 511, 513, 8191, 8193, 40_001])
@pytest.mark.parametrize("k", [1, 16, 512, 2048])
def test_equals_the_reference(kind, n, k):
    torch.manual_seed(0)
    rows = 7
    scores = KINDS[kind](rows, n)
    lengths = torch.tensor([0, 1, n // 2, n - 1, n, n, min(n, k)], dtype=torch.int32)
    got = topk(padded(scores), lengths.cuda(), k, width=n)
    assert torch.equal(got, select_top(scores, lengths, k))


@pytest.mark.parametrize("kind", ["random", "zeros", "ascending", "equal"])
@pytest.mark.parametrize("k", [512, 2048])
def test_slices_do_not_show(kind, k):
    torch.manual_seed(1)
    n = 200_003
    scores = KINDS[kind](3, n)
    lengths = torch.tensor([n, n - 70_000, 40_000], dtype=torch.int32)
    device = padded(scores)
    expected = select_top(scores, lengths, k)
    for slices in (1, 2, 3, 6):
        assert torch.equal(topk(device, lengths.cuda(), k, width=n, slices=slices), expected)


def test_a_million_entries():
    torch.manual_seed(2)
    n = 1 << 20
    scores = torch.randn(2, n).round(decimals=3)
    lengths = torch.tensor([n, n - 5], dtype=torch.int32)
    for slices in (1, 16):
        got = topk(scores.cuda(), lengths.cuda(), 512, slices=slices)
        assert torch.equal(got, select_top(scores, lengths, 512))


def test_candidate_blocks_become_positions():
    torch.manual_seed(3)
    block, width, k = 8, 300, 64
    visible = torch.tensor([0, 1, 5000, 4995], dtype=torch.int32)
    blocks = torch.full((4, width), -1, dtype=torch.int32)
    for row, count in enumerate((0, 1, 300, 150)):
        ids = torch.randperm(620)[:count].sort().values
        blocks[row, :count] = ids.int() if count > 1 else torch.zeros(count, dtype=torch.int32)
    blocks[3, 149] = 4994 // block
    scores = torch.randn(4, width * block).mul_(4).round_()
    got = topk(scores.cuda(), visible.cuda(), k, blocks=blocks.cuda(), block=block)
    for row in range(4):
        positions = (blocks[row].long().unsqueeze(-1) * block + torch.arange(block)).flatten()
        inside = int(((blocks[row] >= 0).repeat_interleave(block) & (positions < visible[row])).sum())
        chosen = select_top(scores[row : row + 1], torch.tensor([inside]), k)[0]
        assert torch.equal(got[row], torch.where(chosen >= 0, positions[chosen.clamp(min=0).long()], -1).int())


@pytest.mark.parametrize("count", [1, 2, 64, 2048])
def test_the_newest_block_is_always_kept(count):
    torch.manual_seed(4)
    n = 30_000
    scores = torch.randn(5, n)
    scores[:, -1] = scores[1, 17] = -9
    visible = torch.tensor([0, 18, count, count + 1, n], dtype=torch.int32)
    got = topk(padded(scores), visible.cuda(), count, width=n, keep_last=True)
    assert torch.equal(got, publish_blocks(scores, visible, 1, count))


def test_a_row_alone_and_again():
    torch.manual_seed(5)
    scores, lengths = torch.randn(200, 20_000).round(decimals=2), torch.randint(0, 20_001, (200,), dtype=torch.int32)
    device = scores.cuda()
    whole = topk(device, lengths.cuda(), 512)
    for _ in range(20):
        assert torch.equal(topk(device, lengths.cuda(), 512), whole)
    for row in (0, 7, 199):
        alone = topk(device[row : row + 1], lengths[row : row + 1].cuda(), 512)
        assert torch.equal(alone[0], whole[row])


def test_wrong_arguments_are_refused():
    scores, lengths = torch.zeros(2, 8, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")
    for change in ({"k": 0}, {"k": 2049}, {"width": 9}):
        with pytest.raises(ValueError):
            topk(scores, lengths, **({"k": 4} | change))
    with pytest.raises(ValueError):
        topk(torch.zeros(2, 9, device="cuda")[:, 1:], lengths, 4)
