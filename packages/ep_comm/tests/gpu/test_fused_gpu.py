"""Experts fused with dispatch and combine over this package's buffers give what the three steps give."""

from __future__ import annotations

import pytest
import torch

from ep_comm import Shape
from ep_comm.cuda import FusedExchange, FusedSizes, Together, virtual, virtual_buffers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_fused_equals_three_steps():
    kernels = pytest.importorskip("mega_moe.cuda.experts")
    layout = pytest.importorskip("mega_moe.cuda.layout")
    rank_tables = pytest.importorskip("mega_moe.cuda.ranks")
    route = pytest.importorskip("mega_moe.cuda.route")
    mega_moe = pytest.importorskip("mega_moe")
    world, tokens, d, inter, each, k = 2, 6, 512, 256, 4, 2
    g = torch.Generator().manual_seed(1)

    def codes(*shape, low=0, high=256):
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=g).cuda()

    sizes = ((2 * inter, d), (d, inter))
    raw = [
        [t for rows, columns in sizes
         for t in (codes(each, rows, columns // 2), codes(each, rows, columns // 32, low=113, high=118))]
        for _ in range(world)
    ]  # fmt: skip
    packed = [layout.pack_experts(*r, None) for r in raw]
    xs = [torch.randn(tokens, d, generator=g).bfloat16().cuda() for _ in range(world)]
    ids = [
        torch.stack([torch.randperm(world * each, generator=g)[:k] for _ in range(tokens)]).int().cuda()
        for _ in range(world)
    ]
    gains = [torch.rand(tokens, k, generator=g).cuda() for _ in range(world)]

    shape = Shape(world, tokens, d, k, each, "bfloat16")
    group = Together(virtual(shape))
    buffers = virtual_buffers(FusedSizes(world, tokens, d, k), torch.device("cuda"))
    exchanges = [FusedExchange(comm, b) for comm, b in zip(group.ranks, buffers, strict=True)]
    ctas = torch.cuda.get_device_properties(0).multi_processor_count // world
    fused = [torch.full((tokens, d), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(world)]
    streams = [torch.cuda.Stream() for _ in range(world)]
    torch.cuda.synchronize()
    received = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(world)]
    # Step by step for all ranks: a kernel that is loaded at its first use waits for those that wait for others.
    chosen = []
    for r, on in enumerate(streams):
        with torch.cuda.stream(on):
            chosen.append(exchanges[r].publish(xs[r], ids[r], gains[r], received=received[r]))
    orders = []
    for r, on in enumerate(streams):
        with torch.cuda.stream(on):
            orders.append(route.permute(buffers[r].mine, each, shared=False))
    for r, on in enumerate(streams):
        tables = rank_tables.Ranks(**buffers[r].tables()._asdict())
        with torch.cuda.stream(on):
            kernels.experts(buffers[r].x[r], chosen[r], buffers[r].weights[r], packed[r], *orders[r],
                            limit=7.0, out=fused[r], ctas=ctas, ranks=tables, tile=16)  # fmt: skip
    torch.cuda.synchronize()
    assert all(kernels.report(p) is None for p in packed)

    group.check()
    assert sum(int(n) for n in received) == world * tokens * k
    given = group.dispatch(xs, ids, gains)
    ys = []
    for r, rows in enumerate(given):
        w13, s13, w2, s2 = raw[r]
        slots = [
            mega_moe.fused_experts(rows.x.float(), rows.ids[:, j : j + 1].contiguous(),
                                   rows.weights[:, j : j + 1].contiguous(), w13, s13, w2, s2, limit=7.0)
            for j in range(k)
        ]  # fmt: skip
        ys.append(torch.stack(slots, 1).contiguous())
    outs = group.combine(ys, given)
    group.check()
    for got, expected in zip(fused, outs, strict=True):
        assert float((got.float() - expected).norm() / expected.norm()) < 2e-2
