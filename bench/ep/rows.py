"""Ledger rows of several GPUs: the bound is what the busiest rank sends over its link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from bench.discover import ROOT
from bench.ep.group import Group
from kernel_core.bench import Timing, ledger_row, source_digest
from kernel_core.bench.ceilings import Ceilings
from kernel_core.bench.cuda import cuda_ceilings, cuda_versions

_COPY = 1 << 28
SOURCES = ("csrc/cuda/**/*", "csrc/include/**/*", "src/ep_comm/**/*.py")
EXPERT_SOURCES = ("csrc/cuda/sm90/expert*", "csrc/cuda/sm90/route*", "src/mega_moe/cuda/*.py")
ENGINE_SOURCES = ("src/orchestrator/cluster/*.py", "src/orchestrator/model/expert_parallel/*.py")
OPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ep_comm.dispatch": ("ep_comm", SOURCES),
    "ep_comm.combine": ("ep_comm", SOURCES),
    "ep_comm.roundtrip": ("ep_comm", SOURCES),
    "ep_comm.barrier": ("ep_comm", SOURCES),
    "ep_comm.move": ("ep_comm", SOURCES),
    "mega_moe.experts_of_ranks": ("mega_moe", EXPERT_SOURCES),
    "orchestrator.ep_engine": ("orchestrator", ENGINE_SOURCES),
}


def digest(op: str) -> str:
    """Of the sources that an op of several GPUs is made from."""
    package, sources = OPS[op]
    folder = ROOT / package if package == "orchestrator" else ROOT / "packages" / package
    return source_digest(folder, sources, "cuda")


class Ledger:
    """Rows of one run, told to the parent as they come. `link_gbps`: what each GPU copies to a peer's memory, in 10^9
    bytes a second, while all do."""

    def __init__(self, group: Group) -> None:
        self.group = group
        found = cuda_ceilings()
        self.link_gbps = link(group)
        self.ceilings = Ceilings(**{**found.as_dict(), "link_gbps": self.link_gbps})
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        self.versions = {**cuda_versions(), "gpus": group.world, "nccl": nccl}

    def add(
        self,
        op: str,
        point: str,
        shape: Mapping[str, object],
        times: Mapping[str, Timing],
        *,
        sent: int,
        note: str = "",
        peers: Mapping[str, str] | None = None,
    ) -> None:
        """`times` has the op under "native" and its peers; `sent`: bytes that this rank sends to others.
        `peers`: versions by name, "" for ours."""
        most = max(self.group.gather(sent))
        row = ledger_row(
            point=f"ep{self.group.world}_{point}", op=op, shape={"gpus": self.group.world, **shape}, backend="cuda",
            timing=times["native"], bytes=most, flops=0, ceilings=self.ceilings, digest=digest(op), path="link",
            peers=[
                {"name": name, "version": (peers or {}).get(name, self.versions["nccl"]),
                 "median_us": float(f"{t.median_us:.4g}")}
                for name, t in times.items() if name != "native"
            ],
            versions=self.versions, note="; ".join(part for part in ("cuda", note) if part),
        )  # fmt: skip
        self.group.tell(row=row)


def link(group: Group) -> float:
    """What a copy into the next rank's memory reaches while all ranks copy."""
    from ep_comm.cuda import Symmetric

    symmetric = Symmetric(group.gloo, group.rank, _COPY)
    source = torch.randint(0, 256, (_COPY,), dtype=torch.uint8, device="cuda")
    to = symmetric.tensors[(group.rank + 1) % group.world]
    times = group.time({"": lambda: to.copy_(source)}, lambda: None, runs=10)
    group.meet()
    symmetric.close(30)
    return float(f"{_COPY / times[''].median_us / 1e3:.4g}")


def all_to_all(group: Group, to: list[int], of: list[int]) -> Callable[[], object]:
    """NCCL's exchange of so many bytes for and of each rank, sizes known to all before."""
    source = torch.zeros(sum(to), dtype=torch.uint8, device="cuda")
    target = torch.zeros(sum(of), dtype=torch.uint8, device="cuda")
    return lambda: dist.all_to_all_single(target, source, of, to)


def ledger_file(folder: Path, device: str, world: int) -> Path:
    return folder / f"{device}x{world}.jsonl"
