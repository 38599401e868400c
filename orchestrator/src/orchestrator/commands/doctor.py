"""`fathom doctor`: what works on this machine, found by trying."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from orchestrator.commands.paths import DEFAULT_MODEL, cache_folder, is_model, project_root

KERNEL_PACKAGES = (
    "kernel_core",
    "mla_fp4",
    "swa_replay",
    "mega_moe",
    "mhc_engram",
    "dspark_kernels",
    "gdr_swapin",
    "ep_comm",
)
LIBRARIES = (
    "torch",
    "numpy",
    "tokenizers",
    "deepseek-recipe",
    "llguidance",
    "pillow",
    "fastapi",
    "uvicorn",
    "pydantic",
)


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it works (None: nothing to judge), what was seen, what to do."""

    name: str
    works: bool | None
    seen: str
    advice: str = ""


def doctor(quick: bool) -> int:
    """Print every finding; returns 1 if something that should work does not."""
    from rich.console import Console
    from rich.table import Table

    console, broken = Console(), []
    sections: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("Machine", _machine),
        ("Libraries", _libraries),
        ("Kernel packages", _kernels),
        ("Backends", _backends),
        ("Models", _models),
    ]
    if not quick:
        sections.append(("Trial", _trial))
    for title, look in sections:
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for finding in look():
            mark = {True: "[green]ok[/]", False: "[red]no[/]", None: " "}[finding.works]
            table.add_row(mark, finding.name, finding.seen)
            if finding.works is False:
                broken.append(finding)
        console.print(table)
        console.print()
    for finding in broken:
        console.print(f"{finding.name}: {finding.advice or finding.seen}", style="red", markup=False)
    return 1 if broken else 0


def _machine() -> Iterator[Finding]:
    version = sys.version_info
    yield Finding("python", version >= (3, 11), platform.python_version(), "Fathom needs Python 3.11 or later")
    yield Finding("system", None, f"{platform.system()} {platform.machine()}, {_processor()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cores", None, str(cores))
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        yield Finding("memory", None, f"{memory:.1f} GiB")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def _libraries() -> Iterator[Finding]:
    for name in LIBRARIES:
        try:
            yield Finding(name, True, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, False, "not installed", "run ./fathom in the checkout; it installs what is missing")


def _kernels() -> Iterator[Finding]:
    for name in KERNEL_PACKAGES:
        try:
            module = importlib.import_module(name)
            native = importlib.import_module(f"{name}._native")
            levels = f", native code at {native.isa()}" if hasattr(native, "isa") else ""
            yield Finding(name, True, f"{getattr(module, '__version__', '?')}{levels}")
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            yield Finding(
                name, False, seen, f"does not load; run ./fathom to build it again, or see build/setup.log ({seen})"
            )


def _backends() -> Iterator[Finding]:
    try:
        import kernel_core
    except Exception as error:
        yield Finding("cpu", False, f"{type(error).__name__}: {error}")
        return
    yield Finding("cpu", True, f"measured; this processor runs {', '.join(kernel_core.available_isas())}")
    yield _nvidia()
    yield Finding("nvidia sm100", None, "compiled and never run: attention, index scores")
    yield _ascend()


def _nvidia() -> Finding:
    """What `--device cuda` would meet."""
    import torch

    from orchestrator.model.device import resolve_device

    kernels = "kernels for rows, rings, attention and index, PyTorch's operators for the rest"
    try:
        resolve_device("cuda")
    except ValueError as error:
        there = torch.cuda.is_available()
        why = str(error).split("here: ", 1)[-1]
        return Finding("nvidia sm90", False if there else None, f"{why}; what there is: {kernels}", str(error))
    return Finding("nvidia sm90", True, f"{torch.cuda.get_device_name()}: {kernels}")


def _ascend() -> Finding:
    """Kernels that ran in emulation alone; what a device lacks here."""
    try:
        import cann_ops
    except ImportError as error:
        return Finding("ascend 950", None, f"absent: {error}")
    there, why = cann_ops.is_available()
    seen = "a device is here; cann_ops.verify tries its kernels on it" if there else why
    return Finding("ascend 950", None, f"lowered, run in emulation alone; {seen}")


def _models() -> Iterator[Finding]:
    root, cached = project_root(), cache_folder() / "models"
    places = [("trained", root / "models" / DEFAULT_MODEL)] if root is not None else []
    for kind, folder in [*places, ("random", cached / DEFAULT_MODEL)]:
        there = is_model(folder)
        yield Finding(
            DEFAULT_MODEL, True if there else None, f"{kind}, {folder}" if there else f"{kind}: not there yet"
        )


def _trial() -> Iterator[Finding]:
    """The smallest model, from writing it to text that a grammar allows."""
    began = time.perf_counter()
    try:
        from orchestrator.engine.llm import LLM
        from orchestrator.engine.request import GrammarSpec, SamplingParams
        from orchestrator.model.make import make_model
        from orchestrator.model.presets import preset

        with tempfile.TemporaryDirectory() as folder:
            llm = LLM(make_model(preset("v41-nano"), folder))
            params = SamplingParams(max_tokens=24, seed=1, grammar=GrammarSpec("regex", "[a-z]{4} [0-9]{4}"))
            output = llm.generate(["def f("], params, progress=False)[0]
        works = output.finish_reason == "stop" and len(output.text) == 9
        yield Finding(
            "v41-nano writes within a grammar", works, f"{output.text!r}, {time.perf_counter() - began:.1f} s"
        )
    except Exception as error:
        yield Finding("v41-nano writes within a grammar", False, f"{type(error).__name__}: {error}")
