"""Layers of a GPU on several ranks, with CPU tensors: packed experts anywhere in a pool, counts on the device."""

from __future__ import annotations

import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference_threads import reference_threads

import ep_comm
import mega_moe
from mega_moe.cuda import widen
from orchestrator.balance.eplb import Placement, RankSlots
from orchestrator.cluster.gpu_counts import GpuStepCounts
from orchestrator.model.expert_parallel import GpuExperts, HeldExperts, PackedPool, PackedSource, fill
from orchestrator.model.expert_parallel.pool import ExpertShapes

HIDDEN, WIDTH, EXPERTS, TOP_K, CPU = 256, 64, 8, 2, torch.device("cpu")
SHAPES = ExpertShapes.of(HIDDEN, WIDTH)


class Stored:
    """Experts of one layer in the stored formats, read one at a time."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(3)

        def codes(*shape):
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)

        def scales(*shape):
            return torch.randint(118, 124, shape, dtype=torch.uint8, generator=g)

        def fp8(*shape):
            return (torch.randn(shape, generator=g) * 0.2).to(torch.float8_e4m3fn)

        self.parts = (
            codes(EXPERTS, *SHAPES.w13), scales(EXPERTS, *SHAPES.s13), codes(EXPERTS, *SHAPES.w2),
            scales(EXPERTS, *SHAPES.s2),
        )  # fmt: skip
        self.shared = mega_moe.SharedExpert(
            fp8(2 * WIDTH, HIDDEN), scales(2 * WIDTH // 32, HIDDEN // 32), fp8(HIDDEN, WIDTH),
            scales(HIDDEN // 32, WIDTH // 32),
        )  # fmt: skip

    def read(self, layer, expert):
        return torch.cat([t[expert].flatten() for t in self.parts])


@pytest.fixture(scope="module")
def stored():
    return Stored()


@pytest.fixture(scope="module")
def shared(stored):
    return widen.pack_experts(*(t[:0] for t in stored.parts), stored.shared)


def test_a_pool_holds_what_the_kernels_read(stored):
    """Bytes go in by pieces at any offset, and come out as the packed weights of that expert."""
    pool = PackedPool(HIDDEN, WIDTH, 3, CPU)
    source = PackedSource(stored, SHAPES, CPU)
    data = source.read(0, 5)
    assert pool.expert_bytes == len(data) == pool.packed.w13.shape[1] + pool.packed.w2.shape[1]
    cuts = [0, 1, 777, pool.packed.w13.shape[1] - 1, pool.packed.w13.shape[1] + 5, len(data)]
    for begin, end in pairwise(cuts):
        pool.write(1, begin, data[begin:end])
    w13, s13, w2, s2, _ = widen.unpack_experts(pool.packed)
    for got, whole in zip((w13, s13, w2, s2), stored.parts, strict=True):
        assert torch.equal(got[1], whole[5])
    assert not pool.packed.w13[0].any() and not pool.packed.w2[2].any()
    pool.write(2, 0, data)
    assert pool.digest(1) == pool.digest(2) != pool.digest(0)
    for name, values in (("hidden", (100, WIDTH, 3, CPU)), ("buffers", (HIDDEN, WIDTH, 0, CPU))):
        with pytest.raises(ValueError, match=name):
            PackedPool(*values)
    with pytest.raises(ValueError, match="offset"):
        pool.write(0, 1, data)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_over_ranks(stored, shared, ranks):
    slots = -(-EXPERTS // ranks) + 1
    rng = np.random.default_rng(ranks)
    table = np.full((1, ranks, slots), -1, np.int32)
    for i, expert in enumerate(rng.permutation(EXPERTS)):
        table[0, i % ranks, i // ranks] = expert
    for rank in range(ranks):  # a copy more on each
        missing = np.setdiff1d(np.arange(EXPERTS), table[0, rank])
        if len(missing):
            table[0, rank, -1] = missing[0]
    placement = Placement(table, EXPERTS)
    g = torch.Generator().manual_seed(ranks)
    counts = [3, 0, 5][:ranks]
    inputs = []
    for n in counts:
        ids = torch.rand(n, EXPERTS, generator=g).topk(TOP_K).indices
        x, weights = torch.randn(n, HIDDEN, generator=g), torch.rand(n, TOP_K, generator=g)
        inputs.append((x, ids.int(), weights, torch.arange(n) == 1))
    links = reference_threads(ep_comm.Shape(ranks, 6, HIDDEN, TOP_K, slots, "bfloat16", "float32"))
    outs, told, errors = [None] * ranks, [None] * ranks, []

    def rank(number):
        try:
            held = HeldExperts(RankSlots(number, placement, 1), PackedPool(HIDDEN, WIDTH, slots + 1, CPU))
            fill(held, PackedSource(stored, SHAPES, CPU))
            step = GpuStepCounts(1, EXPERTS, TOP_K, 4, device=CPU)
            layer = GpuExperts(0, links[number], held, shared, 10.0, step.on_device)
            step.began([True])
            outs[number] = layer(*inputs[number])
            step.ended()
            told[number] = step
        except BaseException as error:
            errors.append(error)
            links[number].abort(str(error))

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    received = 0
    for (x, ids, weights, padding), out, step in zip(inputs, outs, told, strict=True):
        rounded = x.bfloat16().float()
        kept = torch.where(padding[:, None], -1, ids)
        whole = mega_moe.fused_experts(rounded, kept, weights, *stored.parts, limit=10.0)
        nowhere = torch.full((len(x), 1), -1, dtype=torch.int32)
        home = mega_moe.fused_experts(
            x, nowhere, torch.zeros(len(x), 1), *stored.parts, limit=10.0, shared=stored.shared
        )
        assert torch.allclose(out, whole + home, atol=1e-4, rtol=1e-4)
        oldest = step.oldest()
        wanted = np.bincount(ids[~padding].flatten().numpy(), minlength=EXPERTS)
        assert oldest.routed[0].tolist() == [wanted.tolist()] and not oldest.routed[1].any()
        assert oldest.kinds == (1 if wanted.any() else 0)
        received += int(oldest.received[0])
        assert not step.on_device.routed.any() and not step.on_device.received.any()
        step.file(oldest.kinds)
        assert step.window.last().sum() == wanted.sum()
    assert received == sum(int((~p).sum()) * TOP_K for *_, p in inputs)


def test_counts_that_cannot_be_are_refused():
    step = GpuStepCounts(2, 4, 3, 4, device=CPU)
    step.on_device.routed[1, 2] = 4  # no row has a third of three slots
    step.ended()
    with pytest.raises(ValueError, match=r"routed: .*layers \[1\]"):
        _ = step.oldest().kinds


def test_tables_say_what_choose_says(stored):
    """`HeldExperts.tables` and `choose` are one rule."""
    pytest.importorskip("ep_comm.cuda")
    table = np.array([[[0, 1, 2, 3, 6], [4, 5, 6, 7, 0]]], np.int32)
    for number in range(2):
        held = HeldExperts(RankSlots(number, Placement(table, EXPERTS), 1), PackedPool(HIDDEN, WIDTH, 6, CPU))
        ids = torch.arange(EXPERTS, dtype=torch.int32)[None].repeat(5, 1)
        chosen, t = held.choose(0, ids), held.tables(0)
        for token in range(5):
            for e in range(EXPERTS):
                turn = (token + number) % int(t.counts[e])
                expected = int(t.own[e]) if int(t.own[e]) >= 0 else int(t.copies[e, turn])
                assert int(chosen[token, e]) == expected


def test_shapes_split_an_expert(stored):
    parts = SHAPES.split(stored.read(0, 3))
    assert all(torch.equal(got, whole[3]) for got, whole in zip(parts, stored.parts, strict=True))


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    from orchestrator.cluster.options import EpOptions
    from orchestrator.engine.config import EngineConfig
    from orchestrator.model.presets import v41_nano

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = EpOptions(2, engine=EngineConfig(device="cuda")).resolved(v41_nano())
    assert options.ranks == 2 and not options.spread_drafts
    with pytest.raises(ValueError, match="ranks: got 3, allowed is at most the 2 NVIDIA GPUs"):
        EpOptions(3, engine=EngineConfig(device="cuda")).resolved(v41_nano())


def test_experts_packed_for_other_kernels_are_refused(shared):
    from orchestrator.model.expert_parallel.attach import _packed_shared

    assert _packed_shared(None, 0, SimpleNamespace(packed=shared)) is shared
    other = SimpleNamespace(shared13=None, shared2=None)  # SM100's have these too
    with pytest.raises(ValueError, match="SM90"):
        _packed_shared(None, 0, SimpleNamespace(packed=other))
