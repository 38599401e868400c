"""Dispatch and combine between GPUs, against NCCL's all-to-all of the same bytes and the link."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench.ep.group import Group, captured
from bench.ep.rows import Ledger, all_to_all
from ep_comm import Shape, Transfer, reference
from ep_comm.cuda import peers
from kernel_core.bench import Timing

HIDDEN, TOP_K, EXPERTS = 5120, 6, 384
DECODE, PREFILL = (1, 8, 32, 64, 128, 256), (1024, 4096, 8192)
FORMATS = ("fp8", "bfloat16")
_CHECKED = 1024  # tokens a rank up to which every byte is compared with the reference
Load = Literal["even", "zero", "hot", "one"]


class Traffic:
    """What one rank dispatches. Every rank draws what all dispatch, so that each can check the whole.

    load: "even"; "zero": ranks but the first have no token; "hot": half of all tokens want expert 0 first; "one": all
    slots go to the first rank's experts.
    """

    def __init__(self, group: Group, tokens: int, form: str, fixed: bool, load: Load = "even") -> None:
        self.group, self.fixed, world = group, fixed, group.world
        combine = "bfloat16"
        self.shape = s = Shape(world, tokens, HIDDEN, TOP_K, -(-EXPERTS // world), form, combine)  # type: ignore[arg-type]
        g = torch.Generator().manual_seed(tokens)
        counts = [tokens if r == 0 or load != "zero" else 0 for r in range(world)]
        pool = s.experts if load == "one" else s.physical_experts
        self.x = [torch.randn(n, HIDDEN, generator=g).bfloat16() for n in counts]
        self.ids = [torch.rand(n, pool, generator=g).topk(TOP_K).indices.int() for n in counts]
        if load == "hot":
            for ids in self.ids:
                first = ids[::2]
                first[:, 0] = torch.where((first[:, 1:] == 0).any(1), first[:, 0], 0)
        self.weights = [torch.rand(n, TOP_K, generator=g) for n in counts]
        self.mine = [t[group.rank].cuda() for t in (self.x, self.ids, self.weights)]
        self.comm = peers(group.gloo, s, timeout=20, fixed=fixed, packed=not fixed)
        self.received = self.dispatch()
        rows = len(self.received.ids)
        y = torch.Generator("cuda").manual_seed(group.rank)
        self.y = torch.randn(rows, TOP_K, HIDDEN, generator=y, device="cuda").bfloat16()
        self.y_ranks = torch.randn(rows, HIDDEN, generator=y, device="cuda").bfloat16()
        self.combine()
        self.comm.check()

    def dispatch(self) -> Any:
        return self.comm.dispatch(*self.mine, fixed=self.fixed)

    def combine(self, by_rank: bool = False) -> torch.Tensor:
        return self.comm.combine(self.y_ranks if by_rank else self.y, self.received)

    def round_trip(self) -> torch.Tensor:
        return self.comm.combine(self.y, self.dispatch())

    def sent_rows(self) -> list[int]:
        """Tokens of this rank that each rank gets."""
        owners = self.ids[self.group.rank] // self.shape.experts
        return [int((owners == r).any(1).sum()) for r in range(self.group.world)]

    def result_rows(self, by_rank: bool) -> list[int]:
        """Results that go home to each rank from here."""
        here = [ids // self.shape.experts == self.group.rank for ids in self.ids]
        return [int(h.any(1).sum() if by_rank else h.sum()) for h in here]

    def check(self) -> None:
        """Bytes and bits of this rank's rows and sums against the definition. ArithmeticError where one differs."""
        given = (self.x, self.ids, self.weights)
        expected = reference.dispatch(self.shape, *given, fixed=self.fixed)
        self.received = d = self.dispatch()
        e = expected[self.group.rank]
        used = e.sources >= 0
        same = all(torch.equal(a.cpu(), b) for a, b in ((d.counts, e.counts), (d.sources, e.sources), (d.ids, e.ids)))
        if not same or not torch.equal(d.x.cpu().view(torch.uint8)[used], e.x.view(torch.uint8)[used]):
            raise ArithmeticError(f"rank {self.group.rank}: a dispatch differs from the reference")
        if e.scales is not None and d.scales is not None and not torch.equal(d.scales.cpu()[used], e.scales[used]):
            raise ArithmeticError(f"rank {self.group.rank}: scales differ from the reference")
        for by_rank in (False, True):
            out = self.combine(by_rank)
            ys = [y.cpu() for y in self.group.gather((self.y_ranks if by_rank else self.y).cpu())]
            sums = reference.combine(self.shape, ys, expected, self.ids)
            if not torch.equal(out.cpu(), sums[self.group.rank]):
                raise ArithmeticError(f"rank {self.group.rank}: a combine differs from the reference")
        self.comm.check()

    def close(self) -> None:
        self.comm.check()
        self.group.meet()
        self.comm.close()


def measure(group: Group, ledger: Ledger, tokens: int, form: str, load: Load = "even") -> None:
    """Rows of one size: dispatch, combine in both forms, and for few tokens a round trip from a graph."""
    fixed = tokens <= DECODE[-1]
    t = Traffic(group, tokens, form, fixed, load)
    if tokens <= _CHECKED:
        t.check()
    name = f"{form}_t{tokens}" + ("" if load == "even" else f"_{load}")
    shape = {"tokens": tokens, "hidden": HIDDEN, "top_k": TOP_K, "experts": EXPERTS, "format": form, "load": load}
    note = "fixed rows" if fixed else "packed rows, the host waits for their number in the midst"
    me, world = group.rank, group.world

    def off(rows: list[int], size: int) -> tuple[list[int], list[int], int]:
        """Bytes to each rank, of each rank, and to others."""
        to = [n * size for n in rows]
        everybody = group.gather(to)
        return to, [everybody[r][me] for r in range(world)], sum(to) - to[me]

    to, of, sent = off(t.sent_rows(), t.shape.token_bytes)
    calls: dict[str, Any] = {"native": t.dispatch, "NCCL all-to-all, packing and sizes not counted":
                             all_to_all(group, to, of)}  # fmt: skip
    other = None if fixed else Traffic(group, tokens, form, True, load)
    if other is not None:
        calls["ours, fixed rows"] = other.dispatch
    ledger.add("ep_comm.dispatch", f"dispatch_{name}", shape, group.time(calls, t.comm.barrier), sent=sent, note=note,
               peers={"ours, fixed rows": ""})  # fmt: skip
    if other is not None:
        other.close()
    t.received = t.dispatch()
    for by_rank in (False, True):
        to, of, sent = off(t.result_rows(by_rank), HIDDEN * 2)
        calls = {"native": lambda by_rank=by_rank: t.combine(by_rank), "NCCL all-to-all, sums not counted":
                 all_to_all(group, to, of)}  # fmt: skip
        what = "one row a rank" if by_rank else "one row a slot"
        ledger.add("ep_comm.combine", f"combine_{'ranks' if by_rank else 'slots'}_{name}", shape,
                   group.time(calls, t.comm.barrier), sent=sent, note=f"bfloat16, {what}")  # fmt: skip
    if fixed:
        out, of, sent = off(t.sent_rows(), t.shape.token_bytes)
        home, came, more = off(t.result_rows(False), HIDDEN * 2)
        there, again = all_to_all(group, out, of), all_to_all(group, home, came)
        calls = {
            "native": captured(t.round_trip),
            "NCCL, two all-to-alls": captured(lambda: (there(), again())),
        }
        ledger.add("ep_comm.roundtrip", f"roundtrip_{name}", shape, group.time(calls, t.comm.barrier),
                   sent=sent + more, note="dispatch and combine (a row a slot) from a CUDA graph")  # fmt: skip
    t.close()


def barriers(group: Group, ledger: Ledger) -> None:
    """A barrier on the device: two flags' way."""

    comm = peers(group.gloo, Shape(group.world, 8, 128, 1, 1), timeout=20)
    one = torch.zeros(1, device="cuda")
    times = group.time({"native": comm.barrier, "NCCL all-reduce of one number": lambda: dist.all_reduce(one)},
                       comm.barrier, runs=60)  # fmt: skip
    ledger.add("ep_comm.barrier", "barrier", {}, times, sent=8 * (group.world - 1))
    comm.check()
    group.meet()
    comm.close()


def moves(group: Group, ledger: Ledger, expert_bytes: int, layer: int, plan: int) -> None:
    """Experts' weights from each rank to the next, beside nothing: one layer's, and a whole plan's."""
    comm = peers(group.gloo, Shape(group.world, 8, 128, 1, 1), timeout=60)
    for name, count in (("layer", layer), ("plan", plan)):
        pool = torch.randint(0, 256, (2 * count, expert_bytes), dtype=torch.uint8, device="cuda")
        give, take = list(pool[:count]), list(pool[count:])
        samples = []
        for turn in range(8):
            group.meet()
            torch.cuda.synchronize()
            began = time.perf_counter()
            to, of = (group.rank + 1) % group.world, (group.rank - 1) % group.world
            transfers = [Transfer(2 * i, group.rank, to, g) for i, g in enumerate(give)]
            transfers += [Transfer(2 * i, of, group.rank, t) for i, t in enumerate(take)]
            comm.move(transfers).wait()
            torch.cuda.synchronize()
            if turn:
                samples.append((time.perf_counter() - began) * 1e6)
        sums = group.gather([int(g[:4096].sum()) for g in give])
        if [int(t[:4096].sum()) for t in take] != sums[of]:
            raise ArithmeticError(f"rank {group.rank}: moved bytes differ")
        slowest = [max(of_turn) for of_turn in zip(*group.gather(samples), strict=True)]
        ledger.add("ep_comm.move", f"move_{name}", {"experts": count, "bytes_each": expert_bytes},
                   {"native": Timing.of(slowest)}, sent=count * expert_bytes,
                   note="by the host's clock, messages of the two sides included")  # fmt: skip
    group.meet()
    comm.close()
