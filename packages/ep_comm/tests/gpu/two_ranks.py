"""One process of several, a GPU each: started by test_peers_gpu.py and given a rank and a file to meet by."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Problem
from ep_comm import Shape, Transfer, reference
from ep_comm.cuda import peers


def main(rank: int, world: int, meet: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    shape = Shape(world, 64, 1024, 6, 5, "fp8", "bfloat16")
    comm = peers(dist.group.WORLD, shape, timeout=10)
    for turn in range(12):
        fixed, slots = turn % 2 == 0, turn % 4 < 2
        tokens = [(turn * 17 + 29 * r) % 65 for r in range(world)]
        problem = Problem(shape, tokens, turn, device=f"cuda:{rank}")
        d = comm.dispatch(*(t[rank] for t in problem.on_device), fixed=fixed)
        expected = problem.expected(fixed)
        torch.cuda.synchronize()
        problem.check_rows(rank, d, expected[rank])
        ys = problem.results(expected, slots)
        out = comm.combine(ys[rank].cuda(), d)
        comm.check()
        assert torch.equal(out.cpu(), reference.combine(shape, ys, expected, problem.ids)[rank])
        comm.barrier()
        assert comm.all_gather(torch.tensor([rank, turn])).tolist() == [[r, turn] for r in range(world)]
    buffer = torch.full((1 << 20,), rank + 1, dtype=torch.uint8, device="cuda")
    if rank < 2:
        comm.move([Transfer(5, 0, 1, buffer)]).wait()
        assert bool((buffer == 1).all())
    comm.all_gather(torch.tensor([0]))
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
