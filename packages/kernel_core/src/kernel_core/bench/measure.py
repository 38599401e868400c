"""One case, from its description to its ledger row."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import torch

from kernel_core.bench.case import Bench, Case
from kernel_core.bench.ceilings import Ceilings
from kernel_core.bench.cuda import cuda_versions, interleave_cuda
from kernel_core.bench.digest import source_digest
from kernel_core.bench.ledger import cpu_versions, ledger_row
from kernel_core.bench.timing import evict_caches, interleave

REFERENCE = "reference"


def run_case(
    bench: Bench, case: Case, *, package: Path, ceilings: Ceilings, budget_s: float = 2.0, backend: str = "cpu"
) -> dict[str, object]:
    """Build, check and time one case on the bench's device; returns its ledger row.

    The reference is a peer named "reference" whose version is torch's. `package` is the folder that holds the op's
    sources. Errors of the case's own check are raised before anything is timed.
    """
    with torch.inference_mode():
        problem = case.make()
        problem.native()  # before the reference, whose freed results could make stale memory look right
        if problem.check is not None:
            problem.check()
        runs = {"native": problem.native}
        versions = {}
        if problem.reference is not None:
            runs[REFERENCE] = problem.reference
            versions[REFERENCE] = f"torch {torch.__version__}"
        for peer in problem.peers:
            runs[peer.name] = peer.run
            versions[peer.name] = peer.version
        if bench.device == "cuda":
            times = interleave_cuda(runs, budget_s=budget_s, cold=problem.cold)
        else:
            times = interleave(runs, budget_s=budget_s, before=evict_caches() if problem.cold else None)
    peers = [
        {"name": name, "version": versions[name], "median_us": float(f"{times[name].median_us:.4g}")}
        for name in versions
    ]
    return ledger_row(
        point=case.point,
        op=bench.op,
        shape=case.shape,
        backend=backend,
        timing=times["native"],
        bytes=problem.bytes,
        flops=problem.flops,
        ceilings=ceilings,
        digest=source_digest(package, bench.sources, bench.device),
        compute=problem.compute,
        peers=peers,
        versions={**(cuda_versions() if bench.device == "cuda" else cpu_versions()), **_package_version(package.name)},
        note=problem.note,
    )


def _package_version(name: str) -> dict[str, object]:
    try:
        return {name: metadata.version(name)}
    except metadata.PackageNotFoundError:
        return {}
