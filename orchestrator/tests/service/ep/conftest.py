"""Makes the kit beside the tests importable; a model that is small and has experts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("ep_comm")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    return make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20)
