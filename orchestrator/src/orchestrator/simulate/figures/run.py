"""Runs the studies and keeps their results in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kernel_core.check import require
from orchestrator.balance.prefill.bins import EDGES
from orchestrator.simulate.figures import published as p
from orchestrator.simulate.figures import study_load
from orchestrator.simulate.figures.capacity import Rates, Traffic, needs
from orchestrator.simulate.figures.configs import BINNED, EVEN, OURS, PUSHED
from orchestrator.simulate.figures.service import Cluster
from orchestrator.simulate.figures.sizes import Sizes
from orchestrator.simulate.figures.study_core import core
from orchestrator.simulate.figures.study_decode import decode
from orchestrator.simulate.figures.study_retention import LIVES, missed_shares, retention
from orchestrator.simulate.figures.study_router import router
from orchestrator.simulate.figures.traces import AGENTIC, AZURE, MOONCAKE, Session, agentic, azure, mooncake
from orchestrator.simulate.figures.workload import Pattern

LIFE = p.RETENTION.value * 3600
HOUR_LIVES = (60.0, 300.0, 1800.0, 3600.0)
_MISSED = (1 - p.HIT_RATE.value) * p.MEAN_INPUT.value
ONE_TO_ONE = _MISSED * p.DECODE_RATE.value / p.PREFILL_MISSED.value
"""Output tokens a request for which published rates need as many decode GPUs as prefill ones: 719."""


@dataclass
class Studies:
    """The studies by name, over traces that are read when first needed.

    Attributes:
        folder: of the traces. matrix: JSON of `fathom simulate --matrix`, or None. say: told of every run.
    """

    folder: Path
    sizes: Sizes
    seed: int = 0
    matrix: Path | None = None
    cluster: Cluster = field(default_factory=Cluster)
    say: Callable[[str], None] = lambda line: None

    @cached_property
    def sessions(self) -> list[Session]:
        return agentic(self.folder / AGENTIC, self.sizes.sessions)

    @cached_property
    def chats(self) -> Session:
        return mooncake(self.folder / MOONCAKE, self.sizes.requests)

    @cached_property
    def bursts(self) -> Session:
        return azure(self.folder / AZURE, self.sizes.requests)

    @cached_property
    def pattern(self) -> Pattern:
        return Pattern.of(self.sessions, LIFE)

    @cached_property
    def full(self) -> float:
        return study_load.full_rate(self.pattern.requests, self.cluster)

    def constants(self) -> Any:
        return [asdict(constant) for constant in p.CONSTANTS]

    def workload(self) -> Any:
        asked = self.pattern.requests
        return {
            "sessions": len(self.sessions),
            "requests": len(asked),
            "input": float(asked.tokens.mean()),
            "output": float(asked.outputs.mean()),
            "missed": float(asked.missed.mean()),
            "hit_rate": float(asked.hits.sum() / asked.tokens.sum()),
            "full_rate": self.full,
            "edges": list(EDGES),
            "bins": missed_shares(asked, EDGES),
        }

    def rules(self) -> Any:
        return study_load.rules(
            study_load.agentic_traffic(self.pattern), self.full, self.cluster, self.sizes, self.seed, self.say
        )

    def rising(self) -> Any:
        return study_load.rising(
            study_load.agentic_traffic(self.pattern), self.cluster, self.sizes, self.seed, self.say
        )

    def bins(self) -> Any:
        make = study_load.agentic_traffic(self.pattern)
        return study_load.bins(make, self.pattern.requests, self.cluster, self.sizes, self.seed, self.say)

    def side(self) -> Any:
        return study_load.side(study_load.agentic_traffic(self.pattern), self.cluster, self.sizes, self.seed, self.full)

    def mix(self) -> Any:
        make = study_load.mixed_traffic(self.pattern, self.chats, self.bursts, LIFE)
        full = study_load.mixed_rate(self.pattern, self.chats, self.bursts, LIFE, self.cluster)
        configs = (EVEN, OURS, *BINNED[:2], PUSHED[3])
        few = replace(self.sizes, seeds=1, loads=self.sizes.loads[-5::2])
        return study_load.rules(make, full, self.cluster, few, self.seed, self.say, configs)

    def decode(self) -> Any:
        return decode(self.pattern, self.cluster.decode, self.sizes, self.seed, self.say)

    def retention(self) -> Any:
        return {
            "agentic": retention(self.sessions, self.cluster, LIVES),
            "mooncake": retention([self.chats], self.cluster, HOUR_LIVES),
        }

    def capacity(self) -> Any:
        asked = self.pattern.requests
        traffics = (
            Traffic("published lengths, output for P:D of 1:1", p.MEAN_INPUT.value, _MISSED, ONE_TO_ONE),
            Traffic(
                "lengths of the agentic trace",
                float(asked.tokens.mean()),
                float(asked.missed.mean()),
                float(asked.outputs.mean()),
            ),
        )
        found = []
        for traffic in traffics:
            for peak in (1.0, 1.5):
                lines = needs(p.DAILY.value, traffic, Rates(peak=peak))
                found.append({"traffic": asdict(traffic), "peak": peak, "lines": [asdict(line) for line in lines]})
        return found

    def router(self) -> Any:
        calls = self.sizes.calls
        return [{**router(n, calls, self.seed), "core": core(n, calls)} for n in (128, 1000)]

    def faults(self) -> Any:
        return None if self.matrix is None else json.loads(self.matrix.read_text(encoding="utf-8"))


NAMES = (
    "constants", "workload", "rules", "rising", "bins", "side", "mix", "decode", "retention", "capacity", "router",
    "faults",
)  # fmt: skip


def run(studies: Studies, path: Path, only: Sequence[str] = NAMES) -> dict[str, Any]:
    """Run the studies in `only`, and write what is known after each to `path`; others keep what the file has."""
    for name in only:
        require(name in NAMES, "only", repr(name), ", ".join(NAMES))
    content: dict[str, Any] = load(path) if path.is_file() else {}
    for name in NAMES:
        if name not in only:
            continue
        found = getattr(studies, name)()
        if found is None:  # nothing new is known
            continue
        content[name] = found
        content["seed"], content["sizes"] = studies.seed, asdict(studies.sizes)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_short(content), indent=1) + "\n", encoding="utf-8")
    return content


def load(path: Path) -> dict[str, Any]:
    """What `run` has written. Raises ValueError where there is nothing."""
    require(path.is_file(), "results", path, "the file of a run before; run `fathom figures`")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _short(value: Any) -> Any:
    """Six digits are more than any of it deserves."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
