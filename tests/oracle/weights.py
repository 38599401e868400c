"""A checkpoint's tensors: a small safetensors reader and exact dequantisation.

See docs/checkpoint.md, Storage classes and Names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .formats import E2M1, E4M3, decode_signed, ue8m0

# How the bytes of each stored dtype are held: bf16 as its 16 bits, 8-bit floats and FP4 pairs as unsigned bytes.
HELD = {"F32": np.float32, "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I8": np.uint8}


@dataclass(frozen=True)
class Stored:
    """One tensor as stored: safetensors dtype name and the raw array in the type of `HELD`."""

    dtype: str
    data: np.ndarray


def read_tensors(folder: str | Path) -> dict[str, Stored]:
    """All tensors of every `*.safetensors` file in a folder, memory-mapped."""
    found: dict[str, Stored] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        raw = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        header = json.loads(raw[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            held = np.dtype(HELD[entry["dtype"]])
            first, last = entry["data_offsets"]
            if last - first != math.prod(entry["shape"]) * held.itemsize or start + last > len(raw):
                raise ValueError(f"{path.name}: {name} has offsets {first}..{last}, not those of its shape")
            if name in found:
                raise ValueError(f"{name} stands in two files")
            # Copied where the file's alignment does not suit the type.
            data = raw[start + first : start + last]
            data = np.frombuffer(data.tobytes(), held) if held.itemsize > 1 else data
            found[name] = Stored(entry["dtype"], data.reshape(entry["shape"]))
    if not found:
        raise ValueError(f"no tensors in {folder}")
    return found


class Weights:
    """Tensors as float arrays by checkpoint name; dequantised on first use and kept."""

    def __init__(self, tensors: Mapping[str, Stored], dtype: type = np.float64):
        self.tensors = tensors
        self.dtype = dtype
        self._kept: dict[str, np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def plain(self, name: str) -> np.ndarray:
        """A BF16 or F32 tensor by its full name."""
        if name not in self._kept:
            stored = self.tensors[name]
            if stored.dtype == "BF16":
                value = (stored.data.astype(np.uint32) << 16).view(np.float32)
            elif stored.dtype == "F32":
                value = stored.data
            else:
                raise ValueError(f"{name} is {stored.dtype}, expected BF16 or F32")
            self._kept[name] = value.astype(self.dtype)
        return self._kept[name]

    def matrix(self, prefix: str) -> np.ndarray:
        """`prefix.weight` [out, in] of any storage class, with its scale applied."""
        name = prefix + ".weight"
        stored = self.tensors[name]
        if stored.dtype in ("BF16", "F32"):
            return self.plain(name)
        if name not in self._kept:
            decode = {"F8_E4M3": _fp8_blocks, "I8": _fp4_rows}[stored.dtype]
            self._kept[name] = decode(stored.data, self.tensors[prefix + ".scale"].data).astype(self.dtype)
        return self._kept[name]

    def table_rows(self, prefix: str, rows: np.ndarray) -> np.ndarray:
        """Rows of an Engram table [..., dim]: one scale for 32 columns of each row, unlike the 32 x 32 blocks."""
        value = decode_signed(E4M3, self.tensors[prefix + ".weight"].data[rows])
        scale = ue8m0(self.tensors[prefix + ".scale"].data[rows])
        return (value * np.repeat(scale, 32, axis=-1)).astype(self.dtype)


def _fp8_blocks(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    out, width = codes.shape
    if scale.shape != (-(-out // 32), -(-width // 32)):
        raise ValueError(f"scale of shape {scale.shape} for a weight of shape {codes.shape}: one a 32 x 32 block")
    full = np.repeat(np.repeat(ue8m0(scale), 32, axis=0), 32, axis=1)[:out, :width]
    return decode_signed(E4M3, codes) * full


def _fp4_rows(pairs: np.ndarray, scale: np.ndarray) -> np.ndarray:
    out, half = pairs.shape
    if scale.shape != (out, half // 16):
        raise ValueError(f"scale of shape {scale.shape} for packed pairs of shape {pairs.shape}: one for 32 columns")
    codes = np.stack([pairs % 16, pairs // 16], -1).reshape(out, 2 * half)
    return decode_signed(E2M1, codes) * np.repeat(ue8m0(scale), 32, axis=1)
