"""One safetensors file: u64 header length, JSON header, payload. Every number in the header is checked before use.

Parsed here and not by the safetensors package because older releases refuse F8_E8M0, and because a table of 98 GB has
to be mapped or read by rows.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kernel_core.check import require
from orchestrator.model.checkpoint.errors import CheckpointError

# Of everything the format knows, so that a foreign file is measured rightly before its dtype is refused.
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2}
_ITEM_BYTES |= {"BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}

# Scales and FP4 codes are bytes to us: their bits are kept, whatever the dtype means as a number.
_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
_TORCH |= {"F8_E8M0": torch.uint8, "I8": torch.uint8}

MAX_HEADER_BYTES = 100_000_000
_READ_PIECE = 1 << 30  # one read call transfers at most 2 GiB on Linux


class Entry(NamedTuple):
    """Where one tensor stands; `begin` and `end` count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """`entries` by name; `read`, `read_rows` and `map` give tensors (F8_E8M0 and I8 as uint8 of the same bits)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._mapped: np.ndarray | None = None
        self.bytes_read = 0  # of tensors, mapped ones left out
        self.entries = _parse(self.path)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        entry = self._entry(name)
        out = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        self._load(entry.begin, out)
        return out.view(_TORCH[entry.dtype]).view(entry.shape)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """The whole tensor into `out`, contiguous, of the same shape and of the dtype that `read` gives."""
        entry = self._entry(name)
        require(tuple(out.shape) == entry.shape, "out", f"shape {list(out.shape)}", f"{list(entry.shape)} ({name})")
        require(out.dtype == _TORCH[entry.dtype], "out", out.dtype, f"{_TORCH[entry.dtype]} ({name})")
        require(out.is_contiguous(), "out", f"strides {out.stride()}", "a contiguous tensor")
        self._load(entry.begin, out.view(torch.uint8).flatten())

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` (exclusive) of the first dimension, in memory of their own."""
        entry = self._entry(name)
        rows = entry.shape[0] if entry.shape else 0
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows: got {start}:{stop}, allowed is 0 <= start <= stop <= {rows} for {name}")
        stride = (entry.end - entry.begin) // rows if rows else 0
        out = torch.empty((stop - start) * stride, dtype=torch.uint8)
        self._load(entry.begin + start * stride, out)
        return out.view(_TORCH[entry.dtype]).view(stop - start, *entry.shape[1:])

    def map(self, name: str) -> torch.Tensor:
        """The tensor as a read-only view of the mapped file: pages come in when touched. Writing to it crashes."""
        entry = self._entry(name)
        if self._mapped is None:
            with self.path.open("rb") as file:
                self._mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "not writable", which is the point
            raw = torch.from_numpy(self._mapped[entry.begin : entry.end])
        return raw.view(_TORCH[entry.dtype]).view(entry.shape)

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        entry = self.entries[name]
        if entry.dtype not in _TORCH:
            raise CheckpointError(f"{self.path}: {name}: got dtype {entry.dtype}, allowed is {', '.join(_TORCH)}")
        return entry

    def _load(self, begin: int, out: torch.Tensor) -> None:
        """Bytes from `begin` on into `out`, uint8 of one dimension."""
        if not out.numel():
            return
        self.bytes_read += out.numel()
        view = out.numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(begin)
            done = 0
            while done < len(view):
                count = file.readinto(view[done : done + _READ_PIECE])
                if not count:
                    raise CheckpointError(f"{self.path}: ended at byte {begin + done} while reading; copy it again")
                done += count


def _parse(path: Path) -> dict[str, Entry]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; copy it or download it again")
    total = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: {total} bytes, too short for a safetensors header; copy it again")
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER_BYTES, total - 8):
            raise CheckpointError(
                f"{path}: header of {length} bytes in a file of {total}; it is truncated or no safetensors file"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers or nesting beyond Python's limits
        raise CheckpointError(f"{path}: header is no JSON ({error}); copy it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is {type(header).__name__}, allowed is an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length, total) for name, value in header.items()}
    _check_cover(path, entries, 8 + length, total)
    return entries


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{path}: header names {twice} twice; write the file again")
    return seen


def _entry(path: Path, name: str, value: Any, origin: int, total: int) -> Entry:
    """One checked header entry, its offsets moved to the start of the file."""
    where = f"{path}: {name}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: header entry {value!r}, allowed is dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in _ITEM_BYTES:
        raise CheckpointError(f"{where}: got dtype {dtype!r}, allowed is {', '.join(_ITEM_BYTES)}")
    if not _naturals(shape):
        raise CheckpointError(f"{where}: got shape {shape!r}, allowed is a list of integers from 0")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: got data_offsets {offsets!r}, allowed is [begin, end] with 0 <= begin <= end")
    size = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != size:
        raise CheckpointError(f"{where}: {offsets[1] - offsets[0]} bytes, but {dtype} {shape} takes {size}")
    if origin + offsets[1] > total:
        raise CheckpointError(
            f"{where}: ends at byte {origin + offsets[1]} of a file of {total}; the file is truncated, copy it again"
        )
    return Entry(dtype, tuple(shape), origin + offsets[0], origin + offsets[1])


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_cover(path: Path, entries: dict[str, Entry], origin: int, total: int) -> None:
    """The tensors fill the payload: no overlap, no hole, nothing behind the last one."""
    position, previous = origin, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < position:
            raise CheckpointError(f"{path}: {name} overlaps {previous}; write the file again")
        if entry.begin > position:
            gap = entry.begin - position
            raise CheckpointError(f"{path}: {gap} unused bytes between {previous} and {name}; write the file again")
        position, previous = entry.end, name
    if position != total:
        raise CheckpointError(f"{path}: {total - position} bytes behind {previous}; copy the file again")
