"""`fathom bench service`: from options to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from bench import findings
from bench.service import figures, gpu, run
from bench.service.park import ParkError


def measure(console: Console, wanted: run.Wanted, out: Path | None, page: Path | None) -> int:
    """Exit status: 1 when a client got anything but what it should. ValueError for what this machine does not have."""
    if wanted.device == "cuda":
        wanted = gpu.wanted(wanted)
    try:
        found = run.run(console, wanted.small() if wanted.quick else wanted)
    except ParkError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    if out is None and not wanted.quick:
        out = run.DEFAULT_OUT / ("cpu.json" if wanted.device == "cpu" else f"{gpu.ledger_name()}.json")
    if out is not None:
        findings.save(out, found)
        console.print(f"written: {out}", highlight=False)
    for line in figures.tables(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if page is not None:
        write_page(console, found, page)
    wrong = complaints(found)
    for text in wrong[:20]:
        console.print(text, style="red", markup=False, highlight=False)
    return 1 if wrong else 0


def write_page(console: Console, found: dict[str, Any], page: Path) -> None:
    """The page, and beside it its pictures."""
    pictures = figures.draw(found, page.parent, page.stem)
    page.write_text(figures.page(found, [picture.name for picture in pictures]), encoding="utf-8")
    console.print(f"written: {page}", highlight=False)


def complaints(found: dict[str, Any]) -> list[str]:
    """Every wrong answer, and everything that outlived its service."""
    rows = [row for part in ("storm", "recovery") for row in found.get(part, ())]
    wrong = [f"{row['shape']}: {name}: {text}" for row in rows for name, text in row["wrong"].items()]
    wrong += [
        f"{r['shape']}, {r['way']}: {r['different']} other answers" for r in found.get("prefixes", ()) if r["different"]
    ]
    wrong += [
        f"{r['shape']}, {r['at_once']} clients: {r['failed']} failed" for r in found.get("latency", ()) if r["failed"]
    ]
    for row in found.get("ends", ()):
        if row["status"] != 0 or row["left"]:
            wrong.append(f"{row['shape']} ended with {row['status']} and left {row['left'] or 'nothing'}")
    return wrong
