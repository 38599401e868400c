"""One picture of the ledger: how near each point is to its bound, and how far ahead of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.ledger import Row, reference_us


def draw(rows: Sequence[Row], device: str, path: Path) -> None:
    """Write a picture of the rows that have a bound; the file name's ending chooses the format.

    Raises `ValueError` when no row has one, and `ImportError` without matplotlib.
    """
    shown = [row for row in rows if row["fraction"] is not None]
    if not shown:
        raise ValueError(f"rows: got none with a bound in {device}.jsonl, allowed is a ledger with measurements")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 1 + 0.28 * len(shown)), sharey=True)
    places = range(len(shown))
    labels = [row["point"] + ("" if row["backend"] == device else f" ({row['backend']})") for row in shown]
    left.set_yticks(places, [f"{row['op'].split('.')[-1]}  {label}" for row, label in zip(shown, labels, strict=True)])
    left.barh(places, [row["fraction"] for row in shown], color="#2b6cb0")
    left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("bound / time (1 is the measured ceiling)")
    references = [reference_us(row) for row in shown]
    faster = [
        reference / row["median_us"] if reference else 0 for row, reference in zip(shown, references, strict=True)
    ]
    right.barh(places, faster, color="#718096")
    right.set_xlabel("times faster than the PyTorch reference")
    left.invert_yaxis()
    figure.suptitle(f"{device}: {shown[0]['versions'].get('cpu') or ''}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
