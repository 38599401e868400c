"""Checkpoints that several tests share: random, seeded, written once a session in the official layout."""

from __future__ import annotations

from pathlib import Path

import pytest


def _checkpoint(config, folder: Path) -> Path:
    from orchestrator.model.make import make_model

    return make_model(config, folder, seed=20)


@pytest.fixture(scope="session")
def nano_path(tmp_path_factory) -> Path:
    from orchestrator.model.presets import v41_nano

    return _checkpoint(v41_nano(), tmp_path_factory.mktemp("v41-nano"))


@pytest.fixture(scope="session")
def mini_path(tmp_path_factory) -> Path:
    from orchestrator.model.presets import v41_mini

    return _checkpoint(v41_mini(), tmp_path_factory.mktemp("v41-mini"))


@pytest.fixture(scope="session")
def nano(nano_path):
    from orchestrator.model.load import load_model

    return load_model(nano_path)


@pytest.fixture(scope="session")
def mini(mini_path):
    from orchestrator.model.load import load_model

    return load_model(mini_path)
