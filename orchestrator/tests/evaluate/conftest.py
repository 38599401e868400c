"""A random v41-nano, written once a session, and texts to measure it on."""

from __future__ import annotations

import pytest

from orchestrator.evaluate.text import HeldOut

_WORDS = ("def", "return", "for", "in", "while", "if", "else", "class", "self", "value", "index", "print", "import")


def made_up_text(seed: int, words: int) -> str:
    """Words in an order of their own; the same on every machine."""
    import random

    rng = random.Random(seed)
    return "".join(rng.choice(_WORDS) + rng.choice((" ", " ", "\n", "(", "):\n    ")) for _ in range(words))


@pytest.fixture(scope="session")
def nano_folder(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import preset

    return make_model(preset("v41-nano"), tmp_path_factory.mktemp("v41-nano"), seed=20)


@pytest.fixture(scope="session")
def nano(nano_folder):
    from orchestrator.model.load import load_model

    return load_model(nano_folder)


@pytest.fixture(scope="session")
def tokenizer(nano_folder):
    from orchestrator.text.tokenizer import load_tokenizer

    return load_tokenizer(nano_folder)


@pytest.fixture(scope="session")
def heldout(tokenizer):
    return HeldOut(tokenizer, [(f"text {i}", made_up_text(i, 1500)) for i in range(3)])
