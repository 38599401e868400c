"""`fathom bench rank`."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from bench.discover import ROOT
from bench.rank import show
from bench.rank.measure import Step, Timer, measure
from kernel_core.bench import ceilings, cuda_ceilings, device_ledger, interleave
from kernel_core.bench.ceilings import Ceilings
from orchestrator.model.presets import v41_flash_rank, v41_nano
from orchestrator.model.random_weights import random_model


def run(
    console: Console,
    device: str,
    sequences: list[int],
    prefill: list[int],
    context: int,
    out: Path | None,
    small: bool,
    page: Path | None,
) -> None:
    """Measure, save, and write page and picture where asked to."""
    place = torch.device(device)
    config = v41_nano(stages=0) if small else v41_flash_rank()
    console.print(f"random weights of {'a small model' if small else 'v41-flash-rank'} on {device} ...")
    model = random_model(config, device=place, dense="library")
    bounds: Ceilings = cuda_ceilings() if device == "cuda" else ceilings(megabytes=64, repeats=2)
    timer = _timer(device)
    points = [(n, 1, context) for n in sequences] + [(1, n, 0) for n in prefill]
    steps: list[Step] = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("steps", total=len(points))
        for count, tokens, before in points:
            steps.append(measure(model, count, tokens, before, timer, bounds, graph=device == "cuda" and tokens == 1))
            bar.advance(task)
            if device == "cuda":
                torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    about = {
        "gpu": gpu,
        "torch": torch.__version__,
        "copy_gbps": bounds.copy_gbps,
        "bf16_tflops": bounds.bf16_tflops,
        "date": datetime.date.today().isoformat(),
    }
    if out is None and not small:
        out = ROOT / "bench" / "results" / "rank" / f"{device_ledger(gpu) if device == 'cuda' else 'cpu'}.json"
    if out is not None:
        show.save(out, steps, about)
        console.print(f"written: {out}", highlight=False)
    for line in show.steps_table(steps):
        console.print(line, markup=False, highlight=False)
    for step in steps:
        console.print(f"\n{step.kind}, {step.sequences} x {step.tokens}", highlight=False)
        for line in show.ops_table(step):
            console.print(line, markup=False, highlight=False)
    if page is not None:
        write_page(steps, about, page)
        console.print(f"written: {page}", highlight=False)


def write_page(steps: list[Step], about: dict[str, object], page: Path) -> None:
    """The page, and beside it the picture of the decode steps."""
    picture = page.with_suffix(".png")
    show.draw(steps, picture)
    page.write_text(show.page(steps, about, picture.name), encoding="utf-8")


def _timer(device: str) -> Timer:
    if device == "cuda":
        from kernel_core.bench.cuda import CudaClock, interleave_cuda

        clock = CudaClock()
        return lambda call: (
            interleave_cuda({"": call}, budget_s=0.02, min_runs=5, max_runs=20, clock=clock)[""].median_us
        )
    return lambda call: _cpu_us(call)


def _cpu_us(call: Callable[[], object]) -> float:
    return interleave({"": call}, budget_s=0.02, min_runs=3)[""].median_us
