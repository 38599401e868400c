"""Tables in documents, generated from the ledger between two comments:

    <!-- ledger: mla_fp4 -->
    ...
    <!-- ledger: end -->

The word is a package, an op, or `all`. Text outside the comments is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench import format
from bench.discover import ROOT
from bench.ledger import Row, reference_us

_BLOCK = re.compile(r"(<!-- ledger: (?P<what>(?!end\b)[\w.]+) -->\n).*?(<!-- ledger: end -->)", re.DOTALL)
_HEAD = ("point", "shape", "time", "p10 - p90", "bound", "of bound", "reference", "faster")


def documents(root: Path = ROOT) -> list[Path]:
    """Markdown files that may hold a generated table."""
    globs = ("README.md", "docs/*.md", "packages/*/README.md", "orchestrator/README.md", "bench/README.md")
    return sorted(path for pattern in globs for path in root.glob(pattern))


def regenerate(text: str, ledgers: Mapping[str, Sequence[Row]]) -> str:
    """`text` with every block rewritten from the newest rows of each device."""
    return _BLOCK.sub(lambda m: m.group(1) + block(m.group("what"), ledgers) + m.group(3), text)


def block(what: str, ledgers: Mapping[str, Sequence[Row]]) -> str:
    """The contents of one block: for each device a line about the run and a table for each op."""
    parts = []
    for device, rows in ledgers.items():
        wanted = [row for row in rows if what == "all" or row["op"] == what or row["op"].split(".")[0] == what]
        if not wanted:
            continue
        parts.append(f"**{device}**: {_conditions(wanted)}\n")
        ops = dict.fromkeys(row["op"] for row in wanted)
        parts += [_table(op, [row for row in wanted if row["op"] == op]) for op in ops]
    return "\n".join(parts) if parts else "No measurement yet.\n"


def _table(op: str, rows: Sequence[Row]) -> str:
    several = len({row["backend"] for row in rows}) > 1
    lines = [f"`{op}`\n", "| " + " | ".join(_HEAD) + " |", "|---|---|" + "---:|" * (len(_HEAD) - 2)]
    for row in rows:
        reference = reference_us(row)
        cells = (
            f"`{row['point']}`" + (f" ({row['backend']})" if several else ""),
            format.shape(row["shape"]),
            format.duration(row["median_us"]),
            format.span(row["p10_us"], row["p90_us"]),
            format.duration(row["bound_us"]),
            format.percent(row["fraction"]),
            format.duration(reference),
            format.ratio(None if reference is None else reference / row["median_us"]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    notes = dict.fromkeys(f"{row['point']}: {row['note']}" for row in rows if row["note"])
    return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in notes)


def _conditions(rows: Iterable[Row]) -> str:
    rows = list(rows)
    facts = []
    for name, label in (("cpu", ""), ("isa", "instruction set "), ("threads", "threads "), ("torch", "torch ")):
        values = sorted({str(row["versions"][name]) for row in rows if row["versions"].get(name) is not None})
        if values:
            facts.append(label + ", ".join(values))
    dates = sorted({row["date"] for row in rows})
    facts.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
    for name, unit in (("read_gbps", "GB/s read"), ("f32_tflops", "TFLOP/s f32"), ("bf16_tflops", "TFLOP/s bf16")):
        values = [row["ceilings"][name] for row in rows if row["ceilings"].get(name) is not None]
        if values:
            low, high = min(values), max(values)
            facts.append(f"{low:.3g} {unit}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} - {high:.3g} {unit}")
    return "; ".join(facts)
