"""`fathom bench service`: which services are started, and what is measured of each."""

from __future__ import annotations

import datetime
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.discover import ROOT
from bench.service import asks, latency, prefixes, recovery, storm, transfer
from bench.service.park import Park, Shape
from bench.service.reference import Reference

DEFAULT_OUT = ROOT / "bench" / "results" / "service"
PARTS = ("latency", "prefixes", "recovery", "storm")


@dataclass(frozen=True)
class Wanted:
    """`mean`: seconds between two faults of the storm. `kinds`: of its faults."""

    parts: tuple[str, ...] = PARTS
    clusters: tuple[str, ...] = ("local",)
    prefill: int = 2
    decode: int = 2
    encoder: int = 1
    requests: int = 500
    at_once: int = 24
    mean: float = 6.0
    kinds: tuple[str, ...] = ("kill",)
    leaving: float = 0.1
    kills: int = 3
    counts: tuple[int, ...] = (1, 4, 16)
    model: str = "v41-mini"
    device: str = "cpu"
    seed: int = 1
    quick: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("parts", PARTS), ("clusters", ("local", "ray")), ("kinds", ("kill", "pause", "drain"))):
            wrong = sorted(set(getattr(self, name)) - set(allowed))
            if wrong or not getattr(self, name):
                raise ValueError(f"{name}: got {', '.join(wrong) or 'none'}, allowed are {', '.join(allowed)}")

    def small(self) -> Wanted:
        """To try the command."""
        return replace(self, requests=min(self.requests, 24), kills=1, counts=(1, 4), mean=4.0, quick=True)


def run(console: Console, wanted: Wanted) -> dict[str, Any]:
    """Measure; what was found, ready for `figures`. Raises ParkError where a service does not do what it should."""
    found: dict[str, Any] = {"about": about(wanted)}
    with tempfile.TemporaryDirectory(prefix="fathom-service-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        options = service_options(wanted)
        with Reference(folder / "reference", options=options) as reference:
            if "latency" in wanted.parts:
                with _bar(console, "colocated, clients", _latency_count(wanted)) as step:
                    found["latency"] = latency.measure(reference.park, wanted.model, wanted.counts, step=step)
            if "prefixes" in wanted.parts:
                with _bar(console, "colocated, prefixes", 2 * _prompts(wanted)) as step:
                    found["prefixes"] = prefixes.measure(
                        reference.park, wanted.model, prompts=_prompts(wanted), step=step
                    )
            for cluster in wanted.clusters:
                _cluster(console, wanted, cluster, folder / cluster, options, reference, found)
    return found


def _cluster(
    console: Console, wanted: Wanted, cluster: str, folder: Path, options: tuple[str, ...], reference: Reference,
    found: dict[str, Any],
) -> None:  # fmt: skip
    shape = Shape(cluster, wanted.prefill, wanted.decode, wanted.encoder)
    kinds = [kind for kind in asks.KINDS if kind != "image" or wanted.encoder]
    some = asks.make(wanted.seed, wanted.requests, model=wanted.model, kinds=kinds, long=1200)
    if "storm" in wanted.parts:
        with _bar(console, "what clients should get", len(some)) as step:
            expected = reference.answers(some, at_once=16, step=step)
    with Park(shape, folder, options=options, config=config(folder)) as park:
        with console.status(f"starting {shape.title}"):
            park.wait_serving()
        if "latency" in wanted.parts:
            with _bar(console, f"{shape.title}, clients", _latency_count(wanted)) as step:
                found["latency"] += latency.measure(park, wanted.model, wanted.counts, step=step)
            found.setdefault("transfer", []).append(transfer.read(park, "clients"))
        if "prefixes" in wanted.parts:
            with _bar(console, f"{shape.title}, prefixes", 3 * _prompts(wanted)) as step:
                start = transfer.read(park, "before")
                moved = lambda: found.setdefault("transfer", []).append(transfer.read(park, "prefixes", start))  # noqa: E731
                found["prefixes"] += prefixes.measure(
                    park, wanted.model, prompts=_prompts(wanted), step=step, warm=moved
                )
        if "recovery" in wanted.parts:
            with _bar(console, f"{shape.title}, kills", 4 * wanted.kills) as step:
                rows = recovery.measure(park, wanted.model, reference.answers, kills=wanted.kills, step=step)
            found.setdefault("recovery", []).extend(rows)
        if "storm" in wanted.parts:
            with _bar(console, f"{shape.title}, storm", len(some)) as step:
                row = storm.measure(
                    park, some, expected, at_once=wanted.at_once, mean=wanted.mean, kinds=wanted.kinds,
                    leaving=wanted.leaving, seed=wanted.seed, step=step,
                )  # fmt: skip
            found.setdefault("storm", []).append(row)
        ended = park.stop()
        found.setdefault("ends", []).append(
            {"shape": shape.title, "status": ended.status, "left": [process.command[:80] for process in ended.left]}
        )


def service_options(wanted: Wanted) -> tuple[str, ...]:
    device = () if wanted.device == "cpu" else ("--device", wanted.device)
    return ("--max-requests", "1000", *device, "--model", wanted.model)


def config(folder: Path) -> dict[str, Any]:
    """A store that the workers of this machine share, and a grace that a drain's end can be waited for."""
    return {
        "store": {"kind": "embedded", "folder": str(folder / "store"), "capacity_gb": 2.0},
        "cluster": {"grace": 3.0},
    }


def about(wanted: Wanted) -> dict[str, Any]:
    return {
        "machine": _machine(wanted.device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "model": wanted.model,
        "device": wanted.device,
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
        "quick": wanted.quick,
    }


def _machine(device: str) -> str:
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _prompts(wanted: Wanted) -> int:
    return 1 if wanted.quick else 4


def _latency_count(wanted: Wanted) -> int:
    return 3 * sum(wanted.counts)


@contextmanager
def _bar(console: Console, title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar, and what moves it on; a log gets one line at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
