"""Tensors in files: the whole state of a run in one, or bfloat16 values in a few small ones that travel well.

Both begin as a stream of the tensors' bytes with a JSON table of names, dtypes and shapes, and a CRC-32 of each piece,
so that a file that is cut short or damaged is found and named. Files appear under their names only when complete.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

PART_BYTES = 15 << 20
MAX_PARTS = 5
SMALL = 4096
"""Tensors of fewer values stay float32 in a compact snapshot: scales and norms are few and matter."""

_MAGIC = b"fathom-state-1\n\0"
_TABLE = "snapshot.json"
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.int64, torch.float64)}


def save_state(path: str | Path, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and `meta` (JSON values) to one file; the file of that name stays until the new one is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: value.detach().to("cpu", copy=False).contiguous() for name, value in tensors.items()}
    checks = {name: zlib.crc32(_bytes(value)) for name, value in values.items()}
    table = json.dumps({"meta": dict(meta), "tensors": _table(values), "crc32": checks}).encode()
    with _replacing(path) as file:
        file.write(_MAGIC + len(table).to_bytes(8, "little") + zlib.crc32(table).to_bytes(8, "little") + table)
        for value in values.values():
            file.write(_bytes(value))


def load_state(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors on the CPU and `meta` of `save_state`. Raises `ValueError` naming a file that is cut short or damaged."""
    path = Path(path)
    with path.open("rb") as file:
        head = file.read(len(_MAGIC) + 16)
        if len(head) < len(_MAGIC) + 16 or not head.startswith(_MAGIC):
            raise ValueError(f"{path}: is no state of a training run, or was cut short; remove it to begin again")
        length = int.from_bytes(head[-16:-8], "little")
        table = file.read(min(length, path.stat().st_size))
        if len(table) != length or zlib.crc32(table) != int.from_bytes(head[-8:], "little"):
            raise ValueError(f"{path}: its table is damaged or cut short; remove it to begin again")
        content = json.loads(table)
        values = {}
        for name, (dtype, shape) in content["tensors"].items():
            raw = torch.empty(math.prod(shape) * _DTYPES[dtype].itemsize, dtype=torch.uint8)
            read = file.readinto(raw.numpy().data) if len(raw) else 0
            if read != len(raw) or zlib.crc32(raw.numpy().data) != content["crc32"][name]:
                raise ValueError(f"{path}: {name} is damaged or cut short; remove the file to begin again")
            values[name] = raw.view(_DTYPES[dtype]).view(shape)
        if file.read(1):
            raise ValueError(f"{path}: bytes behind the last tensor; remove the file to begin again")
    return values, content["meta"]


def save_compact(folder: str | Path, tensors: Mapping[str, torch.Tensor], step: int) -> list[Path]:
    """Write all tensors in bfloat16 (those of fewer than `SMALL` values in float32) as files of at most `PART_BYTES`.

    At most `MAX_PARTS` of them and `snapshot.json`; returns their paths. Raises `ValueError`, before anything is
    written, where that is not enough. What the folder held stays complete until the new table stands in its place.
    """
    folder = Path(folder)
    values = {name: _compact(value) for name, value in tensors.items()}
    total = sum(value.nbytes for value in values.values())
    count = max(1, -(-total // PART_BYTES))
    if count > MAX_PARTS:
        raise ValueError(f"tensors: got {total} bytes in bfloat16, allowed is {MAX_PARTS * PART_BYTES}")
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for number, piece in enumerate(_pieces(values, PART_BYTES), 1):
        name = f"snapshot-{step:07d}-{zlib.crc32(piece):08x}-{number}-of-{count}.bin"
        parts.append({"file": name, "bytes": len(piece), "crc32": zlib.crc32(piece)})
        with _replacing(folder / name) as file:
            file.write(piece)
    with _replacing(folder / _TABLE) as file:
        file.write(json.dumps({"step": step, "parts": parts, "tensors": _table(values)}, indent=1).encode() + b"\n")
    kept = [folder / str(part["file"]) for part in parts]
    for old in set(folder.glob("snapshot-*.bin")) - set(kept):
        old.unlink()
    return [*kept, folder / _TABLE]


def load_compact(folder: str | Path) -> tuple[dict[str, torch.Tensor], int]:
    """Tensors as `save_compact` stored them, on the CPU, and their step. Raises `ValueError` naming a bad file."""
    folder = Path(folder)
    path = folder / _TABLE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        step, parts, table = int(content["step"]), content["parts"], content["tensors"]
    except FileNotFoundError:
        raise ValueError(f"{path}: is missing; copy the whole snapshot") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is damaged ({error}); copy it again") from error
    stream = bytearray()
    for part in parts:
        file = folder / Path(part["file"]).name
        piece = file.read_bytes() if file.is_file() else b""
        if len(piece) != part["bytes"]:
            raise ValueError(f"{file}: {len(piece)} bytes of {part['bytes']}; copy it again")
        if zlib.crc32(piece) != part["crc32"]:
            raise ValueError(f"{file}: is damaged; copy it again")
        stream += piece
    sizes = {name: math.prod(shape) * _DTYPES[dtype].itemsize for name, (dtype, shape) in table.items()}
    if sum(sizes.values()) != len(stream):
        raise ValueError(f"{path}: tensors of {sum(sizes.values())} bytes, but the parts hold {len(stream)}")
    values, begin = {}, 0
    for name, (dtype, shape) in table.items():
        raw = torch.frombuffer(stream[begin : begin + sizes[name]] or bytearray(1), dtype=torch.uint8)[: sizes[name]]
        values[name] = raw.view(_DTYPES[dtype]).view(shape)
        begin += sizes[name]
    return values, step


class _replacing:
    """A file under a temporary name that takes the place of `path` when the block ends without an error."""

    def __init__(self, path: Path) -> None:
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")

    def __enter__(self) -> BinaryIO:
        self.file = self.partial.open("wb")
        return self.file

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.file.flush()
            os.fsync(self.file.fileno())
        self.file.close()
        if kind is None:
            os.replace(self.partial, self.path)
        else:
            self.partial.unlink(missing_ok=True)


def _compact(value: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if value.numel() < SMALL else torch.bfloat16
    return value.detach().to("cpu", dtype).contiguous()


def _table(values: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    table = {name: (str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in values.items()}
    odd = sorted(name for name, (dtype, _) in table.items() if dtype not in _DTYPES)
    if odd:
        raise ValueError(f"tensors: got {table[odd[0]][0]} for {odd[0]}, allowed is {', '.join(_DTYPES)}")
    return table


def _bytes(value: torch.Tensor) -> memoryview:
    return value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else memoryview(b"")


def _pieces(values: Mapping[str, torch.Tensor], size: int) -> Iterator[bytes]:
    """The bytes of all tensors one after the other, cut every `size` bytes; one empty piece if there are none."""
    stream = b"".join(_bytes(value) for value in values.values())
    for begin in range(0, max(len(stream), 1), size):
        yield stream[begin : begin + size]
