"""Helpers of these tests stand beside them (`cache_kit`, `target_kit`, `history_kit`)."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where that is possible: these tests decide themselves what was durable, not a disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)
