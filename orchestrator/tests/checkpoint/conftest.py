"""A small random checkpoint, written once, and a way to damage copies of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.model.init import init_checkpoint
from orchestrator.model.presets import v41_nano

Tensors = dict[str, tuple[str, list[int], bytes]]


@pytest.fixture(scope="session")
def nano_folder(tmp_path_factory) -> Path:
    """Checkpoint of v41-nano with one draft stage and vision, in one file. Read only."""
    folder = tmp_path_factory.mktemp("nano")
    init_checkpoint(v41_nano(stages=1, vision=True), folder, seed=3)
    return folder


def unpack(path: Path) -> Tensors:
    """All tensors of a file by name, parsed without the code under test."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, payload = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    begin_end = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (e["dtype"], e["shape"], payload[slice(*begin_end[name])]) for name, e in header.items()}


def pack(tensors: Tensors) -> bytes:
    header, payload, position = {}, [], 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        payload.append(data)
        position += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(payload)


@pytest.fixture
def damaged(nano_folder, tmp_path) -> Callable[[Callable[[Tensors], object]], Path]:
    """`damaged(edit)` copies the checkpoint, lets `edit` change its tensors, and returns the new folder."""

    def make(edit: Callable[[Tensors], object]) -> Path:
        folder = tmp_path / "damaged"
        folder.mkdir()
        shutil.copy(nano_folder / "config.json", folder)
        tensors = unpack(nano_folder / "model.safetensors")
        edit(tensors)
        (folder / "model.safetensors").write_bytes(pack(tensors))
        return folder

    return make
