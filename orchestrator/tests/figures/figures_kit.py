"""A trace in the recorded format."""

import gzip
import json
from pathlib import Path


def write_agentic(path: Path, sessions: list[list[list[float]]]) -> Path:
    """Rows are [time, tokens, out, blocks of 64, blocks shared]; the rest of a recorded row is made up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        for number, rows in enumerate(sessions):
            line = {"id": str(number), "block": 64, "req": [[*row, None, None, 0] for row in rows]}
            file.write(json.dumps(line) + "\n")
    return path
