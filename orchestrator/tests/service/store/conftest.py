"""Makes the kit beside the tests importable; a small model, and places for each kind of store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_nano

sys.path.insert(0, str(Path(__file__).parent))

from service_kit_mooncake import Master, why_no_mooncake
from service_kit_store import Worker, config_of, engine_of, run_one


@pytest.fixture(scope="session")
def nano_path(tmp_path_factory) -> Path:
    return make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20)


@pytest.fixture(scope="session")
def nano(nano_path: Path) -> Any:
    return load_model(nano_path)


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Starts workers, and ends those that are left."""
    workers: list[Worker] = []

    def begin(config: dict[str, Any], folder: Path, **options: Any) -> Worker:
        workers.append(Worker(config, folder, **options))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.kill()


@pytest.fixture
def cold(nano_path: Path, nano: Any) -> Callable[..., dict[str, Any]]:
    """What an engine answers that has never seen a prompt."""
    threads = torch.get_num_threads()

    def run(prompt: list[int], tokens: int = 4, mode: str = "exact") -> dict[str, Any]:
        torch.set_num_threads(1)
        try:
            found = run_one(engine_of(config_of(nano_path, "none", None, mode), nano), prompt, tokens)
        finally:
            torch.set_num_threads(threads)
        assert found["cached"] == 0
        return found

    return run


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    """A running master of Mooncake; skips where there is none to be had."""
    why = why_no_mooncake()
    if why:
        pytest.skip(why)
    master = Master(tmp_path / "master.log")
    why = master.start()
    if why:
        pytest.skip(why)
    yield master
    master.kill()


@pytest.fixture
def configured(nano_path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """The config of a service with a store of some kind."""

    def make(kind: str, mode: str = "exact", **store: Any) -> dict[str, Any]:
        if kind == "mooncake":
            options = {**request.getfixturevalue("master").options, **store.pop("options", {})}
            return config_of(nano_path, kind, None, mode, options=options, **store)
        return config_of(nano_path, kind, store.pop("folder", tmp_path / "store"), mode, **store)

    return make


@pytest.fixture
def machines(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Folders of the service for two workers: of one machine for a store that one process writes, else of two."""
    return lambda kind: (tmp_path / "one", tmp_path / ("one" if kind == "embedded" else "two"))
