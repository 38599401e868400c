"""`fathom bench cache`."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import findings
from bench.cache import code_speed, index, shards, show, trace
from bench.discover import ROOT


def run(console: Console, traces: Path | None, out: Path | None, page: Path | None, quick: bool) -> None:
    """Measure, save, and write page and picture where asked to. Without `traces` the replay is left out."""
    found: dict[str, Any] = {"about": _about()}
    if traces is not None:
        say = lambda line: console.print(line, highlight=False)  # noqa: E731
        found["trace"] = [point.as_dict() for point in trace.measure(traces, say, quick=quick)]
    scale = 10 if quick else 1
    found["operations"] = index.operations(500_000 // scale)
    found["match_ms"] = index.match_ms(200 // scale)
    found["code_gbps"] = code_speed.measure(30 // scale)
    found["tail"] = {
        "all targets alive": shards.tail(100_000 // scale),
        "one target known to be dead": shards.tail(100_000 // scale, dead=True),
        "one target dead and not yet known to be": shards.tail(100_000 // scale, dead=True, known=False),
    }
    found["real_tail"] = shards.real_tail(600 // scale)
    if out is None and not quick:
        out = ROOT / "bench" / "results" / "cache" / "cpu.json"
    if out is not None:
        findings.save(out, found)
        console.print(f"written: {out}", highlight=False)
    for line in show.tables(found):
        console.print(line, markup=False, highlight=False)
    if page is not None:
        write_page(found, page)
        console.print(f"written: {page}", highlight=False)


def first_tokens(console: Console, model: Path, tokens: int) -> None:
    """Show the time to the first token of a prompt of so many tokens, a line as soon as it is known."""
    from bench.cache import engine

    about = _about()
    console.print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}, {tokens} tokens", highlight=False)
    for found in engine.measure(model, tokens):
        console.print(f"{found.way:28} {found.seconds:8.3f} s  {found.cached:6} cached", highlight=False)


def write_page(found: dict[str, Any], page: Path) -> None:
    """The page, and beside it the picture of the curves where there are some."""
    picture = page.with_suffix(".png") if found.get("trace") else None
    if picture is not None:
        show.draw(found["trace"], picture)
    page.write_text(show.page(found, picture.name if picture is not None else None), encoding="utf-8")


def _about() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
