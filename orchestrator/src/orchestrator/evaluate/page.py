"""Results as Markdown tables, written into a page between two comments:

    <!-- results: begin -->
    ...
    <!-- results: end -->

Text outside of the comments is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"(<!-- results: begin -->\n).*?(<!-- results: end -->)", re.DOTALL)


def write_page(path: str | Path, content: Mapping[str, Any]) -> None:
    """Rewrite the block of a page from the JSON of an evaluation. Raises ValueError for a page without block."""
    path = Path(path)
    text, count = regenerate(path.read_text(encoding="utf-8"), content)
    if not count:
        raise ValueError(f"{path}: got no <!-- results: begin --> and end; allowed is a page with a place for them")
    path.write_text(text, encoding="utf-8")


def regenerate(text: str, content: Mapping[str, Any]) -> tuple[str, int]:
    """`text` with its block rewritten, and the number of blocks found."""
    body = "\n\n".join(markdown(content)) + "\n"
    return _BLOCK.subn(lambda match: match.group(1) + body + match.group(2), text)


def markdown(content: Mapping[str, Any]) -> Iterator[str]:
    """A heading, a plot and a table for each section that ran."""
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in content["seconds"].items())
    yield f"{content['date'][:10]}, {content['size']} sizes ({seconds}); errors are standard errors."
    if content["bits"]:
        yield "### Bits per byte of held-out text"
        yield "![Bits per byte](mini/bits.svg)"
        yield _table(
            ("run", "bits/byte", "over the exact engine run", "windows", "tokens"), map(_bits, content["bits"])
        )
    if content["replay"]:
        yield "### After a prefix hit"
        yield "![Loss after a hit](mini/replay.svg)"
        rows = ((hit, *_bits(row)) for hit, table in content["replay"].items() for row in table)
        yield _table(("hit", "run", "bits/byte", "over exact", "windows", "tokens"), rows)
    if content["acceptance"]:
        yield "### Speculative decoding, five drafts"
        yield "![Acceptance by position](mini/acceptance.svg)"
        places = [f"draft {k + 1}" for k in range(len(content["acceptance"][0]["rates"]))]
        yield _table(("prompts", "T", "tokens a step", *places, "steps"), map(_acceptance, content["acceptance"]))
    if content["calibration"]:
        yield "### Calibration of the confidence head"
        yield "![Reliability](mini/calibration.svg)"
        yield from _calibration(content["calibration"])
    if content["recall"]:
        yield "### Attention mass that the selection holds"
        yield "![Recall by layer](mini/recall.svg)"
        head = ("context", "layer", "rows", "of", "MXFP4 index", "float32 index", "best rows", "share of all mass")
        yield _table(head, map(_recall, content["recall"]))
    if content["needle"]:
        yield "### Retrieval"
        yield "![Needles](mini/needle.svg)"
        depths = list(dict.fromkeys(n["depth"] for n in content["needle"]))
        yield _table(("tokens", *(f"depth {d:g}" for d in depths)), _needles(content["needle"], depths))


def _bits(row: Mapping[str, Any]) -> tuple[str, ...]:
    bits = f"{row['bits_per_byte']:.4f} ± {row['stderr']:.4f}"
    return row["name"], bits, f"{row['ratio']:.4f} ± {row['ratio_stderr']:.4f}", str(row["windows"]), str(row["tokens"])


def _acceptance(row: Mapping[str, Any]) -> tuple[str, ...]:
    places = (_estimate(rate, 2) for rate in row["rates"])
    return row["kind"], f"{row['temperature']:g}", _estimate(row["length"], 2), *places, str(row["steps"])


def _calibration(content: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for before, after, stored in zip(content["before"], content["after"], content["stored"], strict=True):
        place = "all" if before["place"] is None else str(before["place"] + 1)
        errors = (f"{100 * r['ece']:.1f} ± {100 * r['stderr']:.1f} %" for r in (before, after, stored))
        rows.append((place, *errors, str(before["count"])))
    yield _table(("draft", "without", "fitted in this run", "as stored", "cases"), rows)
    total = content["stored"][-1]["bins"]
    head = ("predicted survival", "observed", "cases")
    yield _table(head, ((f"{b['predicted']:.3f}", f"{b['observed']:.3f}", str(b["count"])) for b in total))


def _recall(row: Mapping[str, Any]) -> tuple[str, ...]:
    shares = (_estimate(row["shares"][way], 3) for way in ("selected", "float32", "best"))
    return *(str(row[key]) for key in ("context", "layer", "chosen", "visible")), *shares, f"{row['mass']:.3f}"


def _needles(rows: Sequence[Mapping[str, Any]], depths: Sequence[float]) -> Iterator[tuple[str, ...]]:
    for every_row, tokens in dict.fromkeys((n["every_row"], n["tokens"]) for n in rows):
        own = {n["depth"]: n for n in rows if (n["every_row"], n["tokens"]) == (every_row, tokens)}
        cells = (f"{own[d]['exact']}/{own[d]['trials']} ({own[d]['characters']:.0%})" for d in depths)
        yield f"{tokens:,}{', every row read' if every_row else ''}", *cells


def _estimate(value: Mapping[str, float | None], digits: int) -> str:
    error = value["stderr"]
    return f"{value['value']:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])
