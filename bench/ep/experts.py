"""Experts of several GPUs: fused with dispatch and combine, as a chain of launches, and as three separate steps."""

from __future__ import annotations

from typing import Any

import torch

from bench.ep.group import Group, captured
from bench.ep.rows import Ledger
from ep_comm import Shape
from kernel_core import formats

HIDDEN, INTER, TOP_K, EACH = 5120, 2304, 6, 7
TOKENS = (1, 8, 32, 64, 128, 256)
LIMIT = 10.0


class Layer:
    """One layer of `EACH` experts a rank. Weights are drawn by the expert's number, so that every rank can make any."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.packed = self.pack(range(group.rank * EACH, (group.rank + 1) * EACH))

    def pack(self, experts: range) -> Any:
        from mega_moe.cuda import layout

        made = []
        for expert in experts:
            g = torch.Generator("cuda").manual_seed(1000 + expert)
            w13 = torch.randn(2 * INTER, HIDDEN, generator=g, device="cuda") * HIDDEN**-0.5
            w2 = torch.randn(HIDDEN, INTER, generator=g, device="cuda") * INTER**-0.5
            made.append((*formats.quantize_mxfp4(w13), *formats.quantize_mxfp4(w2)))
        stacked = [torch.stack([m[i] for m in made]) for i in range(4)]
        return layout.pack_experts(*stacked)


class Problem:
    """One size: what this rank's tokens want, and the three ways to have it. loads as in `traffic.Traffic`."""

    def __init__(self, group: Group, layer: Layer, tokens: int, load: str) -> None:
        from ep_comm.cuda import FusedExchange, FusedSizes, Symmetric, peer_buffers, peers
        from mega_moe.cuda.ranks import Ranks

        self.group, self.layer, world = group, layer, group.world
        experts = EACH * world
        g = torch.Generator().manual_seed(tokens)
        counts = [tokens if r == 0 or load != "zero" else 0 for r in range(world)]
        pool = EACH if load == "one" else experts
        ids = [torch.rand(n, pool, generator=g).topk(TOP_K).indices.int() for n in counts]
        if load == "hot":
            for each in ids:
                each[:, 0] = torch.where((each[:, 1:] == 0).any(1), each[:, 0], 0)
        x = [torch.randn(n, HIDDEN, generator=g) for n in counts]
        weights = [torch.rand(n, TOP_K, generator=g) for n in counts]
        self.all_ids = ids
        self.x, self.ids, self.weights = (t[group.rank].cuda() for t in (x, ids, weights))
        self.shape = Shape(world, tokens, HIDDEN, TOP_K, EACH, "bfloat16", "float32")
        self.comm = peers(group.gloo, self.shape, timeout=20, packed=False)
        sizes = FusedSizes(world, tokens, HIDDEN, TOP_K)
        self.symmetric = Symmetric(group.gloo, group.rank, sizes.offsets()["bytes"])
        self.buffers = peer_buffers(self.symmetric, group.rank, sizes)
        self.exchange = FusedExchange(self.comm, self.buffers)
        self.tables = Ranks(**self.buffers.tables()._asdict(), most=tokens)

    def fused(self, chain: bool = False) -> torch.Tensor:
        from mega_moe.cuda import experts as kernels
        from mega_moe.cuda.route import permute

        chosen = self.exchange.publish(self.x, self.ids, self.weights)
        offsets, rows = permute(self.buffers.mine, EACH, shared=False)
        mine = self.buffers.x[self.group.rank][: len(self.x)]
        out = torch.empty(len(self.x), HIDDEN, device="cuda")
        return kernels.experts(mine, chosen, self.weights, self.layer.packed, offsets, rows, limit=LIMIT, out=out,
                               chain=chain, ranks=self.tables)  # fmt: skip

    def three_steps(self) -> torch.Tensor:
        import mega_moe

        sent = self.comm.dispatch(self.x, self.ids, self.weights, fixed=True)
        y = mega_moe.packed_slots(sent.x, sent.ids, sent.weights, self.layer.packed, limit=LIMIT)
        return self.comm.combine(y, sent)

    def check(self) -> None:
        """The bits of one GPU that holds all experts, from each way. ArithmeticError where one differs."""
        import mega_moe

        whole = self.layer.pack(range(EACH * self.group.world))
        expected = mega_moe.packed_experts(self.x, self.ids, self.weights, whole, limit=LIMIT)
        for name, run in (("fused", self.fused), ("chain", lambda: self.fused(True)), ("three", self.three_steps)):
            got = run()
            self.comm.check()
            if not torch.equal(got, expected):
                off = float((got - expected).norm() / expected.norm().clamp_min(1e-9))
                raise ArithmeticError(f"rank {self.group.rank}: {name} differs from one GPU by {off:.1e}")

    def sent_bytes(self) -> int:
        """Rows out in bfloat16 once a rank, results home in float32 a slot: what three steps have to send."""
        me = self.group.rank
        mine, everybody = self.all_ids[me] // EACH, [ids // EACH for ids in self.all_ids]
        out = sum(int((mine == r).any(1).sum()) for r in range(self.group.world) if r != me)
        home = sum(int((ids == me).sum()) for r, ids in enumerate(everybody) if r != me)
        return out * HIDDEN * 2 + home * HIDDEN * 4

    def close(self) -> None:
        self.comm.check()
        self.group.meet()
        self.comm.close()
        self.symmetric.close(30)


@torch.inference_mode()
def measure(group: Group, ledger: Ledger, layer: Layer, tokens: int, load: str = "even") -> None:
    from mega_moe.cuda import experts as kernels

    p = Problem(group, layer, tokens, load)
    p.check()
    calls = {
        "native": captured(p.fused),
        "ours, the same as four launches": captured(lambda: p.fused(True)),
        "ours, dispatch, experts and combine": captured(p.three_steps),
    }
    times = group.time(calls, p.comm.barrier)
    if kernels.report(layer.packed) is not None:
        raise ArithmeticError(f"rank {group.rank}: a wait of the fused experts ran out of time")
    name = f"experts_t{tokens}" + ("" if load == "even" else f"_{load}")
    shape = {"tokens": tokens, "experts_a_rank": EACH, "hidden": HIDDEN, "inter": INTER, "load": load}
    used = len({int(e) for ids in p.all_ids for e in ids.flatten() if int(e) // EACH == group.rank})
    weights = used * sum(t.shape[1] for t in (layer.packed.w13, layer.packed.w2))
    reading = weights / (ledger.ceilings.copy_gbps or 1) / 1e3
    ledger.add("mega_moe.experts_of_ranks", name, shape, times, sent=p.sent_bytes(),
               peers={n: "" for n in calls},
               note=f"bound of the link alone; reading the {used} wanted experts takes {reading:.0f} us")  # fmt: skip
    p.close()
