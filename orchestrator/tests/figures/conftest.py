"""Small traces in the recorded formats."""

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from figures_kit import write_agentic

from orchestrator.simulate.figures.sizes import Sizes
from orchestrator.simulate.figures.traces import AGENTIC, AZURE, MOONCAKE

TINY = Sizes(
    warm=0.3,
    span=0.8,
    loads=(0.6,),
    seeds=1,
    decode_rates=(100.0,),
    decode_span=0.3,
    rates=(60.0, 500.0),
    calls=5,
)


@pytest.fixture
def tiny() -> Sizes:
    return TINY


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of 24 sessions, 60 chats and 40 bursts."""
    root, rng = tmp_path_factory.mktemp("traces"), random.Random(4)
    sessions = []
    for _ in range(24):
        rows, time, blocks = [], 0.0, 0
        for _ in range(rng.randint(1, 12)):
            shared = rng.choice([blocks, blocks, blocks, blocks // 2])
            blocks = shared + rng.choice([1, 5, 30, 30, 400])
            rows.append([time, blocks * 64 + rng.randint(0, 63), rng.randint(0, 900), blocks, shared])
            time += rng.choice([2.0, 20.0, 400.0, 9000.0])
        sessions.append(rows)
    write_agentic(root / AGENTIC, sessions)
    (root / MOONCAKE).parent.mkdir(parents=True)
    with (root / MOONCAKE).open("w") as file:
        for i in range(60):
            ids = [0, 1, *range(10 + 5 * i, 13 + 5 * i)] if i % 2 else [0, *range(1000 + 5 * i, 1003 + 5 * i)]
            row = {"timestamp": 700 * i, "input_length": 512 * len(ids) - 7, "output_length": 3 + i, "hash_ids": ids}
            file.write(json.dumps(row) + "\n")
    (root / AZURE).parent.mkdir(parents=True)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:17:{i:02}.5800000,{100 + 40 * i},{1 + i}" for i in range(40)]
    (root / AZURE).write_text("\n".join(lines) + "\n")
    return root
