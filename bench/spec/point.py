"""One measured or replayed point, and how points are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

POLICIES = ("none", "fixed 5", "variable")
SOURCES = ("timed", "imposed", "replayed")


@dataclass(frozen=True)
class Point:
    """Decoding at one concurrency with one policy.

    `verified` and `accepted` are rows and tokens of a request's step, its own token included. `source` is "timed" for
    steps of this machine, "replayed" for recorded acceptance under a cost curve, "imposed" for recorded acceptance
    under steps that were run. The rest is of overlapped steps that were run, else 0: the device's and the host's part,
    and shares of the time in which the device idled, at all and (`held`) before sampling, for the host.
    """

    source: str
    policy: str
    sequences: int
    tokens_per_second: float
    verified: float
    accepted: float
    step_ms: float
    device_ms: float = 0.0
    host_ms: float = 0.0
    bubble: float = 0.0
    held: float = 0.0


def save(path: Path, points: Sequence[Point], about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"about": about, "points": [asdict(p) for p in points]}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> tuple[list[Point], dict[str, Any]]:
    """Raises ValueError where the file is not one of `save`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [Point(**p) for p in found["points"]], dict(found["about"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: got no figures of speculation ({error}); `fathom bench spec --out` writes them"
        ) from error
