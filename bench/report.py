"""The result tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench import format
from bench.ledger import Row, reference_us


def results(console: Console, rows: Sequence[Row]) -> None:
    """One table an op. A row has two lines: point, median, bound; below them shape, p10 to p90, bytes."""
    for op in dict.fromkeys(row["op"] for row in rows):
        table = Table(title=op, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.add_column("point\n[dim]shape[/dim]", overflow="fold", min_width=24)
        for heading in ("time\n[dim]p10 - p90[/dim]", "bound\n[dim]bytes[/dim]", "of bound", "reference", "faster"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            if row["op"] == op:
                table.add_row(*_cells(row))
        console.print(table)


def ceilings(console: Console, row: Row) -> None:
    """One line: the rates that the bounds are taken from."""
    rates, versions = row["ceilings"], row["versions"]
    units = {"read_gbps": "GB/s read", "copy_gbps": "GB/s copy", "f32_tflops": "TFLOP/s f32",
             "bf16_tflops": "TFLOP/s bf16"}  # fmt: skip
    shown = [f"{rates[name]} {unit}" for name, unit in units.items() if rates.get(name) is not None]
    console.print(
        f"ceilings of this run: {', '.join(shown)} ({versions['threads']} threads, {versions['isa']})", highlight=False
    )


def _cells(row: Row) -> tuple[str, ...]:
    reference = reference_us(row)
    return (
        f"{row['point']}\n[dim]{format.shape(row['shape'])}[/dim]",
        f"{format.duration(row['median_us'])}\n[dim]{format.span(row['p10_us'], row['p90_us'])}[/dim]",
        f"{format.duration(row['bound_us'])}\n[dim]{format.size(row['bytes'])}[/dim]",
        format.percent(row["fraction"]),
        format.duration(reference),
        format.ratio(None if reference is None else reference / row["median_us"]),
    )
