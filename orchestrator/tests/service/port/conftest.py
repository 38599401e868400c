"""Makes the kit beside the tests importable, and small models for them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def nano_path(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    return make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20)


@pytest.fixture(scope="session")
def nano(nano_path):
    import torch

    from orchestrator.model.load import load_model

    torch.set_num_threads(1)
    return load_model(nano_path)


@pytest.fixture(scope="session")
def tokenizer(nano_path):
    from orchestrator.text.tokenizer import load_tokenizer

    return load_tokenizer(nano_path)


@pytest.fixture(scope="session")
def seeing_path(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    config = v41_nano(vision=True)
    config = replace(config, vision=replace(config.vision, min_pixels=14 * 14 * 12, max_image_tokens=40))
    return make_model(config, tmp_path_factory.mktemp("seeing"), seed=20)


@pytest.fixture(scope="session")
def seeing(seeing_path):
    from orchestrator.model.load import load_model

    return load_model(seeing_path)
