import gzip
import json
import os
from pathlib import Path

import pytest

from orchestrator.cache.chain import usable_blocks
from orchestrator.cache.replay import replay
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.traces import agentic, mooncake

SESSIONS = [
    [[0.0, 1000, 9, 15, 0], [10.0, 2000, 9, 31, 15], [500.0, 2100, 9, 32, 31], [510.0, 700, 9, 10, 4]],
    [[0.0, 640, 9, 10, 0], [5.0, 640, 9, 10, 10]],
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for number, requests in enumerate(SESSIONS):
            line = {"id": str(number), "block": 64, "req": [[*r, 1.0, 1.0, 0] for r in requests]}
            file.write(json.dumps(line) + "\n")
    return path


def expected() -> float:
    """Blocks of 128 that a request shares with an earlier one, at most all but its last token."""
    hits = sum(min(r[4] // 2, usable_blocks(r[1])) * 128 for session in SESSIONS for r in session)
    return hits / sum(r[1] for session in SESSIONS for r in session)


def test_hits_without_bounds_are_the_shared_blocks(trace: Path) -> None:
    outcome = replay(agentic(trace), 100)
    assert outcome.rate() == pytest.approx(expected())
    assert outcome.requests == 6 and outcome.published == 7 + 8 + 1 + 3 + 5
    assert outcome.most_blocks == outcome.published


def test_a_short_life_and_a_small_store_lose_hits(trace: Path) -> None:
    short = RetentionPolicy(ttl={Retention.AGENT: 60.0, Retention.CHAT: 60.0}, grace_s=0.0)
    without = [r for r in SESSIONS[0] if r[0] != 500.0]  # nothing is left after eight minutes of silence
    hits = sum(min(r[4] // 2, usable_blocks(r[1])) * 128 for r in without + SESSIONS[1])
    assert replay(agentic(trace), 100, policy=short).rate() == pytest.approx(hits / 7080)
    small = replay(agentic(trace), 100, capacity=1200)
    assert small.rate() < expected() and small.refused > 0 and small.most_blocks <= 12


def test_the_same_seed_gives_the_same_times(trace: Path) -> None:
    assert [r.time for r in agentic(trace, seed=3)] == [r.time for r in agentic(trace, seed=3)]
    assert [r.keys for r in agentic(trace, seed=3)] == [r.keys for r in agentic(trace, seed=3)]


def test_chats_share_across_requests(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    lines = [{"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 2]},
             {"timestamp": 9000, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 3]}]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = mooncake(path, start_s=5.0)
    assert [r.time for r in requests] == [5.0, 14.0] and [len(r.keys) for r in requests] == [8, 8]
    outcome = replay(requests, 100)
    assert outcome.hits[Retention.CHAT] == 8 * 128 and outcome.tokens[Retention.AGENT] == 0


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path: got .*none, allowed is a trace file"):
        agentic(tmp_path / "none")


@pytest.mark.slow
def test_the_recorded_sessions_reach_their_hit_rate() -> None:
    folder = os.environ.get("FATHOM_TRACES")
    if not folder:
        pytest.skip("FATHOM_TRACES does not name the folder of recorded traces")
    requests = agentic(Path(folder) / "agentic-claude-code-weka" / "sessions_compact_unique.jsonl.gz")
    outcome = replay(requests, 114_048)
    assert outcome.requests == 46_218 and abs(outcome.rate() - 0.9617) < 0.001
