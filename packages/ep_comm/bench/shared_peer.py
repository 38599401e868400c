"""The other rank of the shared-memory benchmarks, a program: PATH TOKENS OP."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import ep_comm
from ep_comm import Dispatched, Shape

IDLE = 600.0  # seconds that the peer waits for the next call


def shape_of(tokens: int) -> Shape:
    return Shape(2, tokens, 5120, 6, 192, dispatch="fp8", combine="bfloat16")


def inputs(shape: Shape, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    tokens = shape.max_tokens
    x = torch.randn(tokens, shape.hidden, generator=g).bfloat16()
    ids = torch.rand(tokens, shape.physical_experts, generator=g).topk(shape.top_k).indices.int()
    return x, ids, torch.rand(tokens, shape.top_k, generator=g)


def results(shape: Shape, got: Dispatched) -> torch.Tensor:
    return torch.ones(*got.ids.shape, shape.hidden, dtype=torch.bfloat16)


def peer(path: Path, tokens: int, op: str) -> None:
    shape = shape_of(tokens)
    torch.set_num_threads(1)
    comm = ep_comm.shared_memory(path, 1, shape, timeout=IDLE)
    given = inputs(shape, 1)
    got = comm.dispatch(*given)
    y = results(shape, got)
    try:
        while True:
            comm.dispatch(*given) if op == "dispatch" else comm.combine(y, got)
    except ep_comm.Broken:
        return  # the benchmark is over


if __name__ == "__main__":
    peer(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
