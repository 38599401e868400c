"""Recorded verifications on disk, so that a machine without the time to record some can replay them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from orchestrator.evaluate.speculate import Trial


def save(path: Path, trials: Sequence[Trial], model: str, temperature: float) -> None:
    """Confidences with four places, without the logits that they were made of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(t), "confidence_logits": (), "confidence": [round(c, 4) for c in t.confidence]} for t in trials]
    lines = ",\n".join(json.dumps(row) for row in rows)
    about = json.dumps({"model": model, "temperature": temperature})
    path.write_text(f'{{"about": {about}, "trials": [\n{lines}\n]}}\n', encoding="utf-8")


def load(path: Path) -> tuple[list[Trial], dict[str, object]]:
    """Trials, and what they were recorded with. Raises ValueError where the file is not one of `save`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        trials = [
            Trial(**{**t, "confidence_logits": (), "confidence": tuple(map(float, t["confidence"]))})
            for t in found["trials"]
        ]
        return trials, dict(found["about"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: got no recorded verifications ({error}); `fathom bench spec --trials` writes them"
        ) from error
