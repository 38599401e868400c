"""One case, from its description to its ledger row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from kernel_core.bench.case import Bench, Case, Peer, Problem
from kernel_core.bench.ceilings import Ceilings
from kernel_core.bench.cuda import cuda_versions, interleave_cuda
from kernel_core.bench.digest import source_digest
from kernel_core.bench.ledger import cpu_versions, ledger_row
from kernel_core.bench.timing import evict_caches, interleave

REFERENCE = "reference"


@dataclass
class _Prepared:
    """A case that is built and checked: its callables by name, the versions of the peers, who was left out and why."""

    problem: Problem
    runs: dict[str, Callable[[], object]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def check_case(bench: Bench, case: Case) -> list[str]:
    """Build one case, run everything once and check it, time nothing; returns sentences about peers left out."""
    with torch.inference_mode():
        prepared = _prepare(bench, case)
        for run in prepared.runs.values():
            run()
        _finish(bench)
    return prepared.left_out


def run_case(
    bench: Bench, case: Case, *, package: Path, ceilings: Ceilings, budget_s: float = 2.0, backend: str = "cpu"
) -> dict[str, object]:
    """Build, check and time one case on the bench's device; returns its ledger row.

    The reference is a peer named "reference" whose version is torch's. `package` is the folder that holds the op's
    sources. Errors of the case's own check are raised before anything is timed; an `Offer` that fails is left out.
    """
    with torch.inference_mode():
        prepared = _prepare(bench, case)
        problem, runs, versions = prepared.problem, prepared.runs, prepared.versions
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
        path=problem.path,
        peers=peers,
        versions={**(cuda_versions() if bench.device == "cuda" else cpu_versions()), **_package_version(package.name)},
        note="; ".join(part for part in (problem.note, *prepared.left_out) if part),
    )


def _prepare(bench: Bench, case: Case) -> _Prepared:
    problem = case.make()
    prepared = _Prepared(problem)
    problem.native()  # before the reference, whose freed results could make stale memory look right
    if problem.check is not None:
        problem.check()
    prepared.runs["native"] = problem.native
    if problem.reference is not None:
        prepared.runs[REFERENCE] = problem.reference
        prepared.versions[REFERENCE] = f"torch {torch.__version__}"
    for peer in problem.peers:
        if isinstance(peer, Peer):
            run, version = peer.run, peer.version
        else:
            try:
                run = peer.make()
                run()
                _finish(bench)
            except Exception as error:  # whatever another project raises; ours is still to be measured
                prepared.left_out.append(f"{peer.name} left out: {_reason(error)}")
                continue
            version = _version(peer.distribution)
        prepared.runs[peer.name] = run
        prepared.versions[peer.name] = version
    return prepared


def _finish(bench: Bench) -> None:
    if bench.device == "cuda" and torch.cuda.is_available():
        torch.cuda.synchronize()


def _reason(error: Exception) -> str:
    """One short line of an error."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__} {line[:120]}".strip()


def _version(distribution: str) -> str:
    if not distribution:
        return ""
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return distribution


def _package_version(name: str) -> dict[str, object]:
    try:
        return {name: metadata.version(name)}
    except metadata.PackageNotFoundError:
        return {}
