"""The result tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench import format
from bench.ledger import Row


def results(console: Console, rows: Sequence[Row]) -> None:
    """One table an op. A row has two lines: point, median, bound; below them shape, p10 to p90, bytes."""
    for op in dict.fromkeys(row["op"] for row in rows):
        named = any(peer["name"] != "reference" for row in rows if row["op"] == op for peer in row["peers"])
        beside = "beside it" if named else "reference"
        table = Table(title=op, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.add_column("point\n[dim]shape[/dim]", overflow="fold", min_width=24)
        for heading in ("time\n[dim]p10 - p90[/dim]", "bound\n[dim]bytes[/dim]", "of bound", beside, "faster"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            if row["op"] == op:
                table.add_row(*_cells(row, named))
        console.print(table)
        for row in rows:
            if row["op"] == op and "left out" in row["note"]:
                console.print(f"{row['point']}: {row['note']}", style="dim", markup=False, highlight=False)


def line(console: Console, row: Row) -> None:
    """One measurement as soon as it is there."""
    beside = "".join(f", {peer['name']} {format.duration(peer['median_us'])}" for peer in row["peers"])
    console.print(
        f"{row['point']}: {format.duration(row['median_us'])}, bound {format.duration(row['bound_us'])}{beside}",
        markup=False, highlight=False,
    )  # fmt: skip


def ceilings(console: Console, row: Row) -> None:
    """One line: the rates that the bounds are taken from."""
    rates, versions = row["ceilings"], row["versions"]
    units = {"read_gbps": "GB/s read", "copy_gbps": "GB/s copy", "f32_tflops": "TFLOP/s f32",
             "bf16_tflops": "TFLOP/s bf16", "fp8_tflops": "TFLOP/s fp8"}  # fmt: skip
    shown = [f"{rates[name]} {unit}" for name, unit in units.items() if rates.get(name) is not None]
    where = versions["gpu"] if "gpu" in versions else f"{versions['threads']} threads, {versions['isa']}"
    console.print(f"ceilings of this run: {', '.join(shown)} ({where})", highlight=False)


def _cells(row: Row, named: bool) -> tuple[str, ...]:
    beside = row["peers"]
    return (
        f"{row['point']}\n[dim]{format.shape(row['shape'])}[/dim]",
        f"{format.duration(row['median_us'])}\n[dim]{format.span(row['p10_us'], row['p90_us'])}[/dim]",
        f"{format.duration(row['bound_us'])}\n[dim]{format.size(row['bytes'])}[/dim]",
        format.percent(row["fraction"]),
        "\n".join((f"{peer['name']} " if named else "") + format.duration(peer["median_us"]) for peer in beside)
        or format.UNKNOWN,
        "\n".join(format.ratio(peer["median_us"] / row["median_us"]) for peer in beside) or format.UNKNOWN,
    )
