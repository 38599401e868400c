"""Recorded traffic as arrays: when requests came, their lengths, what they share with earlier ones.

Prefix ids of the agentic trace hold within a session, those of Mooncake across all requests; Azure has none.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np

from kernel_core.check import require
from orchestrator.simulate.figures.sharing import Gaps, Shared, Tracker

AGENTIC = Path("agentic-claude-code-weka") / "sessions_compact_unique.jsonl.gz"
MOONCAKE = Path("mooncake") / "conversation_trace.jsonl"
AZURE = Path("azure-llm-2023") / "AzureLLMInferenceTrace_conv.csv"


@dataclass(frozen=True)
class Session:
    """Requests that may share prefixes, by time.

    Attributes:
        times: float64 seconds from the session's start. tokens, outputs: int64, of prompts and answers.
        shared: what each finds. gaps: of all its blocks.
    """

    times: np.ndarray
    tokens: np.ndarray
    outputs: np.ndarray
    shared: list[Shared]
    gaps: Gaps

    def hits(self, life: float) -> np.ndarray:
        """int64 tokens that each request finds where blocks stay for `life` seconds after a use."""
        return np.array([s.hit(life) for s in self.shared], np.int64)


def traces_folder(named: Path | None, root: Path | None) -> Path:
    """The folder of traces: as named, as FATHOM_TRACES says, or `shared/traces` beside the project's `root`."""
    known = os.environ.get("FATHOM_TRACES")
    beside = [root.parent / "shared" / "traces"] if root is not None else []
    places = [named] if named is not None else [*([Path(known)] if known else []), *beside]
    for folder in places:
        if (folder / AGENTIC).is_file():
            return folder
    raise ValueError(f"traces: got {named or known or 'none'}, allowed is a folder that holds {AGENTIC}")


def agentic(path: Path, sessions: int | None = None) -> list[Session]:
    """Sessions of coding agents, the first `sessions` of the file.

    How much of a prompt an earlier request had is recorded, not which one: the latest that is long enough is taken, as
    in `cache.traces`.
    """
    found = []
    for line in islice(_lines(path), sessions):
        recorded = json.loads(line)
        rows = sorted(recorded["req"], key=lambda row: row[0])
        tracker = Tracker(recorded["block"])
        earlier: list[np.ndarray] = []
        for time, tokens, _, count, common, *_ in rows:
            head = next((ids[:common] for ids in reversed(earlier) if len(ids) >= common), np.empty(0, np.int64))
            ids = np.concatenate([head, tracker.fresh(count - len(head))])
            earlier.append(ids)
            tracker.note(time, tokens, ids)
        found.append(_session(((row[0], row[1], row[2]) for row in rows), tracker))
    require(len(found) > 0, "path", path, "a trace with sessions")
    return found


def mooncake(path: Path, requests: int | None = None) -> Session:
    """An hour of chats, the first `requests` of it, as one session: ids hold across requests."""
    tracker, rows = Tracker(512), []
    for line in islice(_lines(path), requests):
        row = json.loads(line)
        time, ids = row["timestamp"] / 1e3, np.array(row["hash_ids"], np.int64)
        tracker.upto(int(ids.max(initial=-1)) + 1)
        tracker.note(time, row["input_length"], ids)
        rows.append((time, row["input_length"], row["output_length"]))
    require(len(rows) > 0, "path", path, "a trace with requests")
    return _session(rows, tracker)


def azure(path: Path, requests: int | None = None) -> Session:
    """An hour of chats without prefix ids, the first `requests` of it: nothing is shared."""
    tracker, rows = Tracker(128), []
    first: datetime | None = None
    for row in islice(csv.DictReader(_lines(path)), requests):
        stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
        first = first or stamp
        time = (stamp - first).total_seconds()
        tracker.note(time, int(row["ContextTokens"]), np.empty(0, np.int64))
        rows.append((time, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    require(len(rows) > 0, "path", path, "a trace with requests")
    return _session(rows, tracker)


def _session(rows: Iterable[tuple[float, int, int]], tracker: Tracker) -> Session:
    times, tokens, outputs = zip(*rows, strict=True)
    return Session(
        np.array(times, float),
        np.array(tokens, np.int64),
        np.array(outputs, np.int64),
        tracker.shared,
        tracker.gaps(),
    )


def _lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise ValueError(f"path: got {path}, allowed is a trace file")
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from file
