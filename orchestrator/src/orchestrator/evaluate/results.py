"""Everything that one evaluation found, as JSON and as named figures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.evaluate.acceptance import Acceptance
from orchestrator.evaluate.bits import Bits
from orchestrator.evaluate.calibration import Calibration
from orchestrator.evaluate.needle import Needle, hit_rate
from orchestrator.evaluate.recall import WAYS, Recall


@dataclass(frozen=True)
class Figure:
    """One number with its unit, its standard error and the number of samples behind it."""

    name: str
    value: float
    unit: str
    stderr: float
    samples: int


@dataclass
class Results:
    """Sections that did not run are empty. `notes` say what a reader has to know before comparing."""

    model: str
    sha256: str
    date: str
    size: str
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    bits: list[Bits] = field(default_factory=list)
    replay: dict[int, list[Bits]] = field(default_factory=dict)
    acceptance: list[Acceptance] = field(default_factory=list)
    calibration: Calibration | None = None
    recall: list[Recall] = field(default_factory=list)
    needle: list[Needle] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All of it but single verifications, and the figures."""
        content = asdict(self)
        for entry in content["acceptance"]:
            del entry["trials"]
        content["figures"] = {f.name: {k: v for k, v in asdict(f).items() if k != "name"} for f in self.figures()}
        return content

    def figures(self) -> list[Figure]:
        """What a card states and a ledger keeps, in a fixed order."""
        return [f for part in (_bits, _replay, _acceptance, _calibration, _recall, _needle) for f in part(self)]


def checkpoint_digest(folder: str | Path) -> str:
    """SHA-256 over names and contents of a checkpoint's weights and configuration."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".safetensors" or path.name in ("config.json", "tokenizer.json"):
            with path.open("rb") as file:
                digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _slug(text: str) -> str:
    return text.replace(", ", "_").replace(" ", "_")


def _bits(results: Results) -> Iterator[Figure]:
    for row in results.bits:
        name = f"bits_{_slug(row.name)}"
        yield Figure(name, row.bits_per_byte, "bits/byte", row.stderr, row.windows)
        if row.name != "engine":
            yield Figure(f"{name}_ratio", row.ratio, "ratio", row.ratio_stderr, row.windows)


def _replay(results: Results) -> Iterator[Figure]:
    for hit, rows in results.replay.items():
        for row in rows:
            if row.name != "exact":
                name = f"replay_h{hit}_{_slug(row.name)}_ratio"
                yield Figure(name, row.ratio, "ratio", row.ratio_stderr, row.windows)


def _acceptance(results: Results) -> Iterator[Figure]:
    for a in results.acceptance:
        name = f"acceptance_{'greedy' if a.temperature == 0 else f't{a.temperature:g}'}_{a.kind}"
        yield Figure(f"{name}_length", a.length.value, "tokens/step", a.length.stderr, a.steps)
        for k, (rate, cases) in enumerate(zip(a.rates, a.cases, strict=True), 1):
            yield Figure(f"{name}_draft{k}", rate.value, "rate", rate.stderr, cases)


def _calibration(results: Results) -> Iterator[Figure]:
    if results.calibration is not None:
        for name in ("before", "after", "stored"):
            total = getattr(results.calibration, name)[-1]
            yield Figure(f"calibration_ece_{name}", total.ece, "probability", total.stderr, total.count)


def _recall(results: Results) -> Iterator[Figure]:
    for r in results.recall:
        for way in WAYS:
            share = r.shares[way]
            yield Figure(f"recall_c{r.context}_l{r.layer}_{_slug(way)}", share.value, "share", share.stderr, r.queries)


def _needle(results: Results) -> Iterator[Figure]:
    for every_row, tokens in dict.fromkeys((n.every_row, n.tokens) for n in results.needle):
        own = [n for n in results.needle if (n.every_row, n.tokens) == (every_row, tokens)]
        rate, name = hit_rate(own), f"needle_{tokens}{'_every_row_read' if every_row else ''}"
        yield Figure(name, rate.value, "rate", rate.stderr, sum(n.trials for n in own))
