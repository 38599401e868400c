"""Makes the kit beside the tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from transfer_kit import KINDS, Wired


@pytest.fixture(params=KINDS)
def wired(request):
    with Wired(request.param) as wired:
        yield wired
    wired.check_nothing_is_left()
