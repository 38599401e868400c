"""Tables in documents, generated from the ledger between two comments:

    <!-- ledger: mla_fp4 h200 -->
    ...
    <!-- ledger: end -->

The first word is a package, an op, or `all`; the second names the device, all devices without one. The block
`<!-- ledger: roofline -->` holds bounds that follow from the shapes alone. Text outside the comments is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench import format, roofline
from bench.discover import ROOT
from bench.ledger import Row, reference_us

_BLOCK = re.compile(
    r"(?P<start><!-- ledger: (?P<what>(?!end\b)[\w.]+)(?: (?P<device>[\w-]+))? -->\n).*?(?P<end><!-- ledger: end -->)",
    re.DOTALL,
)
_HEAD = ("point", "shape", "time", "p10 - p90", "bound", "of bound", "reference", "faster")
_GPU_HEAD = ("point", "time", "p10 - p90", "rate", "bound", "of bound", "also ours", "peer", "its time", "faster")
OWN = ("reference", "triton", "sparse kernel")  # of a row's peers; also "ours, ...". All else is another project's


def documents(root: Path = ROOT) -> list[Path]:
    """Markdown files that may hold a generated table."""
    globs = ("README.md", "docs/*.md", "packages/*/README.md", "orchestrator/README.md", "bench/README.md")
    return sorted(path for pattern in globs for path in root.glob(pattern))


def regenerate(text: str, ledgers: Mapping[str, Sequence[Row]]) -> str:
    """`text` with every block rewritten from the newest rows of each device."""
    return _BLOCK.sub(lambda m: m["start"] + block(m["what"], ledgers, m["device"]) + m["end"], text)


def block(what: str, ledgers: Mapping[str, Sequence[Row]], only: str | None = None) -> str:
    """The contents of one block: for each device a line about the run and a table for each op."""
    if what == "roofline":
        return roofline.table(ledgers)
    parts = []
    for device, rows in ledgers.items():
        if only is not None and device != only:
            continue
        wanted = [row for row in rows if what == "all" or row["op"] == what or row["op"].split(".")[0] == what]
        if not wanted:
            continue
        parts.append(f"**{device}**: {_conditions(wanted)}\n")
        ops = dict.fromkeys(row["op"] for row in wanted)
        parts += [_table(op, [row for row in wanted if row["op"] == op]) for op in ops]
    if parts:
        return "\n".join(parts)
    return "No measurement yet.\n" if only is None else f"Not measured on this device yet: {only}.\n"


def _table(op: str, rows: Sequence[Row]) -> str:
    if any(row["versions"].get("gpu") for row in rows):
        return _gpu_table(op, rows)
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
    return "\n".join(lines) + "\n" + _notes({row["point"]: row["note"] for row in rows})


def _gpu_table(op: str, rows: Sequence[Row]) -> str:
    """As `_table`, with the rate reached, the second implementation and the fastest peer that ran beside."""
    lines = [f"`{op}`\n", "| " + " | ".join(_GPU_HEAD) + " |", "|---|" + "---:|" * 5 + "---|---|---:|---:|"]
    for row in rows:
        implementation, *_ = row["note"].split("; ")
        own = (f"{p['name']} {format.duration(p['median_us'])}" for p in row["peers"] if _is_own(p))
        others = [p for p in row["peers"] if not _is_own(p)]
        best = min(others, key=lambda p: p["median_us"], default=None)
        cells = (
            f"`{row['point']}`" + (f" ({implementation})" if implementation not in ("", "cuda") else ""),
            format.duration(row["median_us"]),
            format.span(row["p10_us"], row["p90_us"]),
            rate(row),
            format.duration(row["bound_us"]),
            format.percent(row["fraction"]),
            ", ".join(own) or format.UNKNOWN,
            best["name"] if best else format.UNKNOWN,
            format.duration(best["median_us"] if best else None),
            format.ratio(best["median_us"] / row["median_us"] if best else None),
        )
        lines.append("| " + " | ".join(cells) + " |")
    versions = sorted({f"{p['name']} is {p['version']}" for row in rows for p in row["peers"]
                       if p["version"] and not _is_own(p)})  # fmt: skip
    peers = f"\n{'; '.join(versions)}.\n" if versions else ""
    left_out = {row["point"]: "; ".join(row["note"].split("; ")[1:]) for row in rows}
    return "\n".join(lines) + "\n" + peers + _notes(left_out)


def _is_own(peer: Mapping[str, object]) -> bool:
    return peer["name"] in OWN or str(peer["name"]).startswith("ours, ")


def rate(row: Row) -> str:
    """TFLOP/s where operations make the bound, GB/s where bytes do."""
    bandwidth = row["ceilings"].get("read_gbps") or row["ceilings"].get("copy_gbps")
    by_bytes = row["bytes"] / (bandwidth * 1e3) if row["bytes"] and bandwidth else 0.0
    if row["flops"] and (row["bound_us"] is None or by_bytes < 0.99 * row["bound_us"]):
        return f"{row['flops'] / row['median_us'] / 1e6:.0f} TFLOP/s"
    return f"{row['bytes'] / row['median_us'] / 1e3:.0f} GB/s" if row["bytes"] else format.UNKNOWN


def _notes(notes: Mapping[str, str]) -> str:
    """Each note once, after the points that it is about."""
    points: dict[str, list[str]] = {}
    for point, note in notes.items():
        if note:
            points.setdefault(note, []).append(point)
    return "".join(f"\n{', '.join(names)}: {note}\n" for note, names in points.items())


def _conditions(rows: Iterable[Row]) -> str:
    rows = list(rows)
    facts = []
    labels = {"cpu": "", "gpu": "", "multiprocessors": "multiprocessors ", "isa": "instruction set ",
              "threads": "threads ", "torch": "torch ", "triton": "Triton "}  # fmt: skip
    for name, label in labels.items():
        values = sorted({str(row["versions"][name]) for row in rows if row["versions"].get(name) is not None})
        if values:
            facts.append(label + ", ".join(values))
    dates = sorted({row["date"] for row in rows})
    facts.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
    units = {"read_gbps": "GB/s read", "copy_gbps": "GB/s copied, in and out", "f32_tflops": "TFLOP/s f32",
             "bf16_tflops": "TFLOP/s bf16", "fp8_tflops": "TFLOP/s fp8"}  # fmt: skip
    if any(row["ceilings"].get("read_gbps") for row in rows):
        del units["copy_gbps"]  # not what the bounds are made of
    for name, unit in units.items():
        values = [row["ceilings"][name] for row in rows if row["ceilings"].get(name) is not None]
        if values:
            ends = dict.fromkeys(_digits(value) for value in (min(values), max(values)))
            facts.append(f"{' - '.join(ends)} {unit}")
    return "; ".join(facts)


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
