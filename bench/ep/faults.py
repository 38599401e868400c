"""What must not happen between GPUs: wrong bits under delays, and waits without an end."""

from __future__ import annotations

import random
import time

import torch

from bench.ep.group import Group
from ep_comm import CommError, PeerTimeout, Shape, reference

_TIMEOUT_S = 3.0


def delayed(group: Group, iterations: int = 1000) -> None:
    """Round trips of changing sizes, forms and loads with ranks late at random; every bit against the definition."""
    from ep_comm.cuda import peers

    s = Shape(group.world, 24, 512, 4, 5, "fp8", "bfloat16")
    comm = peers(group.gloo, s, timeout=30)
    late = random.Random(group.rank)
    for turn in range(iterations):
        g = torch.Generator().manual_seed(turn)
        counts = torch.randint(0, 25, (group.world,), generator=g).tolist()
        xs = [torch.randn(n, s.hidden, generator=g) for n in counts]
        ids = [torch.randint(-1, s.physical_experts, (n, s.top_k), generator=g, dtype=torch.int32) for n in counts]
        weights = [torch.rand(n, s.top_k, generator=g) for n in counts]
        fixed = bool(turn % 2)
        if late.random() < 0.3:
            torch.cuda._sleep(late.randrange(1, 2_000_000))  # cycles of the device
        elif late.random() < 0.1:
            time.sleep(late.random() * 2e-3)
        mine = [t[group.rank].cuda() for t in (xs, ids, weights)]
        d = comm.dispatch(*mine, fixed=fixed)
        expected = reference.dispatch(s, xs, ids, weights, fixed=fixed)
        ys = []
        for rank, e in enumerate(expected):  # all ranks' results, so that each can add them up
            y = torch.Generator().manual_seed(10_000 * turn + rank)
            rows = torch.randn(len(e.ids), s.top_k, s.hidden, generator=y)
            rows[e.ids < 0] = float("nan")
            ys.append(rows)
        if late.random() < 0.2:
            torch.cuda._sleep(late.randrange(1, 1_000_000))
        out = comm.combine(ys[group.rank].cuda(), d)
        comm.check()
        e = expected[group.rank]
        used = e.sources >= 0
        right = torch.equal(d.counts.cpu(), e.counts) and torch.equal(d.ids.cpu(), e.ids)
        right = right and torch.equal(d.x.cpu().view(torch.uint8)[used], e.x.view(torch.uint8)[used])
        if not right or not torch.equal(out.cpu(), reference.combine(s, ys, expected, ids)[group.rank]):
            raise ArithmeticError(f"rank {group.rank}: iteration {turn} differs from the reference")
        if turn + 1 in (iterations // 4, iterations // 2):
            group.tell(say=f"{turn + 1} of {iterations} round trips under delays ...")
    group.meet()
    comm.close()
    group.tell(say=f"{iterations} round trips under random delays: every bit as defined")


def stopped(group: Group) -> None:
    """The last rank does not come: the others say so within the time-out, and nothing hangs."""
    from ep_comm.cuda import peers

    for call in ("dispatch", "combine", "barrier"):
        s = Shape(group.world, 8, 256, 2, 2, "bfloat16", "bfloat16")
        comm = peers(group.gloo, s, timeout=_TIMEOUT_S)
        x, ids, weights = torch.zeros(8, 256).cuda(), torch.zeros(8, 2).int().cuda(), torch.zeros(8, 2).cuda()
        if call == "combine":
            d = comm.dispatch(x, ids, weights, fixed=True)
            comm.check()
        group.meet()
        seconds, missing = 0.0, ()
        if group.rank != group.world - 1:
            began = time.perf_counter()
            try:
                if call == "dispatch":
                    comm.dispatch(x, ids, weights, fixed=True)
                elif call == "combine":
                    comm.combine(torch.zeros(len(d.ids), 2, 256).cuda(), d)
                else:
                    comm.barrier()
                comm.check()
                raise ArithmeticError(f"rank {group.rank}: {call} went on without the last rank")
            except CommError as error:
                seconds = time.perf_counter() - began
                missing = error.waiting_for if isinstance(error, PeerTimeout) else ()
        everybody = group.gather((seconds, missing))
        slowest = max(s for s, _ in everybody)
        named = any(group.world - 1 in m for _, m in everybody)
        if slowest > _TIMEOUT_S + 2 or not named:
            raise ArithmeticError(f"{call} without the last rank: {everybody}")
        group.tell(say=f"{call} without the last rank: reported after {slowest:.2f} s, time-out {_TIMEOUT_S:.0f} s")
        comm.close()
