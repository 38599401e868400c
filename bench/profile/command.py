"""The command itself."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from bench.profile.trace import Trace, decoding, record
from orchestrator.commands.paths import find_model
from orchestrator.model.load import load_model


def run(
    console: Console, model: str | None, device: str, sequences: int, context: int, steps: int, speculation: str | int,
    out: Path,
) -> None:  # fmt: skip
    """Trace decode steps of a model and say what the file shows."""
    folder = find_model(model)
    console.print(f"{folder.name} on {device}: {sequences} sequences of {context} tokens ...", highlight=False)
    engine = decoding(load_model(folder, dense="fixed", device=device), sequences, context, speculation)
    found = record(engine, steps, out)
    for line in summary(found):
        console.print(line, markup=False, highlight=False)
    console.print(f"written: {out}; open it at ui.perfetto.dev or with chrome://tracing", highlight=False)


def summary(found: Trace) -> list[str]:
    """Lines for the terminal."""
    lines = [
        f"steps: {', '.join(found.steps)}",
        f"host parts that overlap device work: {found.overlapped}",
        f"a step: device {found.device_ms:.2f} ms, host {found.host_ms:.2f} ms; device idle {found.bubble * 100:.1f} %",
    ]
    lines += [f"  {count:6d}  {name}" for name, count in found.ops.most_common()]
    if found.kernels:
        lines.append("kernels of the device:")
        lines += [f"  {count:6d}  {name[:100]}" for name, count in found.kernels.most_common()]
    return lines
