"""Makes the kit beside the tests importable, and gives rigs that are closed behind each test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from service_kit_front import Rig, wait_until

from orchestrator.engine.grammar import GrammarCompiler
from orchestrator.text import bundled_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    made = bundled_tokenizer("v41-mini")
    made.grammars = GrammarCompiler(made)
    return made


@pytest.fixture
def make_rig(tokenizer):
    """Rigs whose requests bring the tokens that `script(spec)` gives, or those of a text."""
    made = []

    def make(script="Hello, world", **options):
        if isinstance(script, str):
            tokens = tokenizer.encode_with_specials(script)
            rig = Rig(tokenizer, lambda spec: tokens, **options)
        else:
            rig = Rig(tokenizer, script, **options)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.cluster.release()
        wait_until(rig.free, what=rig.cluster.holding)
        rig.close()
