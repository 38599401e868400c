"""A folder of safetensors files as one table of tensors: a single file, or shards placed by an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.model.checkpoint.safetensors_file import SafetensorsFile
from orchestrator.model.config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PREFIX = "model."


class Checkpoint:
    """The headers of a checkpoint folder, agreed with its index. Names are without the optional `model.` prefix.

    Opening reads headers only. Raises `CheckpointError` where files and index contradict one another.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such folder; give a folder with config.json and {SINGLE}")
        self.config = self._read_config()
        files = self._open()
        prefix = _common_prefix(self.folder, [name for file in files for name in file.entries])
        self._home: dict[str, tuple[SafetensorsFile, str]] = {}
        for file in files:
            for stored in file.entries:
                name = stored.removeprefix(prefix)
                if name in self._home:
                    other = self._home[name][0].path.name
                    raise CheckpointError(f"{self.folder}: {name} stands in {other} and in {file.path.name}; keep one")
                self._home[name] = (file, stored)
        #: Dtype, shape and place of every tensor.
        self.entries = {name: file.entries[stored] for name, (file, stored) in self._home.items()}

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far through this object; headers and mapped tensors are not among them."""
        return sum(file.bytes_read for file in {id(f): f for f, _ in self._home.values()}.values())

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._find(name)[0].path

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor in memory of its own; F8_E8M0 and I8 come as uint8 with the same bits."""
        file, stored = self._find(name)
        return file.read(stored)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """The whole tensor into memory that the caller has."""
        file, stored = self._find(name)
        file.read_into(stored, out)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` (exclusive) of a tensor."""
        file, stored = self._find(name)
        return file.read_rows(stored, start, stop)

    def map(self, name: str) -> torch.Tensor:
        """The tensor as a read-only view of its mapped file."""
        file, stored = self._find(name)
        return file.map(stored)

    def _find(self, name: str) -> tuple[SafetensorsFile, str]:
        if name not in self._home:
            raise CheckpointError(f"{self.folder}: has no tensor {name}")
        return self._home[name]

    def _read_config(self) -> ModelConfig:
        path = self.folder / "config.json"
        values = _read_json(path)
        try:
            return ModelConfig.from_hf(values)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def _open(self) -> list[SafetensorsFile]:
        if (self.folder / INDEX).exists():
            return _open_shards(self.folder)
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{self.folder}: holds neither {SINGLE} nor {INDEX}; download the weights")
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:4])
            raise CheckpointError(
                f"{self.folder}: holds {len(files)} files ({names} ...) but no {INDEX}; add the index"
            )
        return [SafetensorsFile(files[0])]


def _open_shards(folder: Path) -> list[SafetensorsFile]:
    """The shards that the index names, each holding exactly the tensors that the index places in it."""
    path = folder / INDEX
    index = _read_json(path)
    placement = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placement, dict) or not placement:
        raise CheckpointError(f"{path}: has no weight_map; rebuild the index")
    wanted: dict[str, set[str]] = {}
    for name, shard in placement.items():
        if not isinstance(shard, str) or shard != Path(shard).name or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path}: places {name} in {shard!r}, allowed is a .safetensors file of this folder")
        wanted.setdefault(shard, set()).add(name)
    files = [SafetensorsFile(folder / shard) for shard in sorted(wanted)]
    for file in files:
        shard = file.path.name
        absent = sorted(wanted[shard] - set(file.entries))
        if absent:
            raise CheckpointError(
                f"{file.path}: lacks {_some(absent)}, which {INDEX} places there; download both from one revision"
            )
        extra = sorted(set(file.entries) - wanted[shard])
        if extra:
            places = placement.get(extra[0])
            where = f"{INDEX} places it in {places}" if places else f"{INDEX} does not name it"
            raise CheckpointError(
                f"{file.path}: holds {_some(extra)}, but {where}; keep one copy and rebuild the index"
            )
    _check_total(path, index, files)
    return files


def _check_total(path: Path, index: dict[str, Any], files: list[SafetensorsFile]) -> None:
    total = (index.get("metadata") or {}).get("total_size")
    payload = sum(entry.end - entry.begin for file in files for entry in file.entries.values())
    if total is not None and total != payload:
        raise CheckpointError(f"{path}: total_size {total}, but the shards hold {payload} bytes; rebuild the index")


def _common_prefix(folder: Path, names: list[str]) -> str:
    prefixed = [name for name in names if name.startswith(_PREFIX)]
    if not prefixed:
        return ""
    if len(prefixed) != len(names):
        plain = next(name for name in names if not name.startswith(_PREFIX))
        raise CheckpointError(
            f"{folder}: mixes names with and without the prefix {_PREFIX!r} ({prefixed[0]}, {plain}); use one form"
        )
    return _PREFIX


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; download it with the weights")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no JSON ({error}); download it again") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
