"""One service of several processes for all tests here, and one process beside it that says what is right.

Every test runs on the CPU and, where there is one, on an NVIDIA GPU that all processes share.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT), str(HERE), str(HERE.parents[1] / "server")]

collect_ignore_glob = [] if (ROOT / "bench" / "service").is_dir() else ["test_*.py"]  # the runner makes the requests


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def serves():
    """Skips while the command or the model is not there."""
    if not (ROOT / "models" / "v41-mini" / "config.json").is_file():
        pytest.skip("models/v41-mini is not in this checkout")
    words = [sys.executable, "-m", "orchestrator.cli", "serve", "--help"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if "--cluster" not in shown.stdout:
        pytest.skip("`fathom serve` has no --cluster here")


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def device(request):
    return request.param


@pytest.fixture(scope="session")
def serve_options(device):
    from proof_kit import options

    return options(device)


@pytest.fixture(scope="session")
def reference(serves, serve_options, tmp_path_factory):
    from bench.service.reference import Reference

    options = (*serve_options, "--prefix-cache", "off")  # every prompt is computed whole
    with Reference(tmp_path_factory.mktemp("reference"), options=options) as made:
        yield made


@pytest.fixture(scope="session")
def _park(serves, device, serve_options, tmp_path_factory):
    from proof_kit import config

    from bench.service.park import Park, Shape

    folder = tmp_path_factory.mktemp("park")
    shape = Shape("local", 2, 2, 1) if device == "cpu" else Shape("local", 1, 1, 1)
    with Park(shape, folder, options=serve_options, config=config(folder)) as made:
        made.wait_serving()
        yield made


@pytest.fixture
def park(_park):
    """Up and idle when a test begins."""
    _park.wait_up(180)
    _park.wait_idle(60)
    return _park
