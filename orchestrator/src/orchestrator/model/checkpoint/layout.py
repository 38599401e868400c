"""Which shard a tensor goes to, and where in it: the published order, the same for every run.

Within a file: Engram tables, F32, BF16, F8_E8M0, F8_E4M3, I8, and by name among equals. Together with one shard a
layer this gives the header lengths and file sizes of all published shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Literal

from orchestrator.model.checkpoint.specs import TensorSpec

_ORDER = {"F32": 0, "BF16": 1, "F8_E8M0": 2, "F8_E4M3": 3, "I8": 4}
_TABLE = (".engram.embed.weight", ".engram.embed.scale")

CAPPED_BYTES = 15 << 20
"""Largest file of the `capped` placement, header included."""

Placement = Literal["single", "layers", "capped"] | Callable[[str], int | str]
"""`single`: one file without index. `layers`: as published, a shard for vision, embedding, each layer, head, each
draft stage and each Engram. `capped`: model order, a new file before one would exceed `CAPPED_BYTES`. A function gives
any sortable key; names with equal keys share a shard."""


def place(specs: Mapping[str, TensorSpec], placement: Placement) -> dict[str, list[str]]:
    """File name to tensor names in file order."""
    if placement == "single":
        return {"model.safetensors": _file_order(specs, list(specs))}
    key = _layer_key if placement == "layers" else placement
    if placement == "capped":
        key = _capped_keys(specs).__getitem__
    if not callable(key):
        raise ValueError(
            f"placement: got {placement!r}, allowed is 'single', 'layers', 'capped' or a function of the name"
        )
    groups: dict[tuple[int, ...] | int | str, list[str]] = {}
    for name in specs:
        groups.setdefault(key(name), []).append(name)
    keys = sorted(groups)  # type: ignore[type-var]  # one function gives keys of one kind
    files = [f"model-{i:05d}-of-{len(keys):05d}.safetensors" for i in range(1, len(keys) + 1)]
    return {file: _file_order(specs, groups[group]) for file, group in zip(files, keys, strict=True)}


def header(specs: Mapping[str, TensorSpec], names: list[str]) -> tuple[bytes, dict[str, int]]:
    """The leading bytes of a file that holds `names` in this order, and where each tensor starts in the file."""
    table, position, begins = {}, 0, {}
    for name in names:
        spec = specs[name]
        begins[name] = position
        end = position + spec.nbytes
        table[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


def _capped_keys(specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """File number of each name; a weight and its scale stay together. Raises `ValueError` for one too large."""
    owners: dict[str, list[str]] = {}
    for name in specs:
        owners.setdefault(re.sub(r"\.scale$", ".weight", name), []).append(name)
    keys: dict[str, int] = {}
    number, held = 1, 8  # a file's header begins with its length, and is padded to 8 bytes
    for owner, names in owners.items():
        size = sum(specs[name].nbytes + _header_bytes(name, specs[name]) for name in names)
        if size + 16 > CAPPED_BYTES:
            raise ValueError(f"placement: got 'capped', but {owner} takes {size} bytes, allowed is {CAPPED_BYTES - 16}")
        if held + size + 8 > CAPPED_BYTES:
            number, held = number + 1, 8
        held += size
        keys |= dict.fromkeys(names, number)
    return keys


def _header_bytes(name: str, spec: TensorSpec) -> int:
    """At most what a tensor's entry takes in the header: offsets have ten digits or fewer here."""
    entry = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [10**9, 10**9]}
    return len(json.dumps({name: entry}))


def _file_order(specs: Mapping[str, TensorSpec], names: list[str]) -> list[str]:
    def key(name: str) -> tuple[int, int, str]:
        table = next((i for i, end in enumerate(_TABLE) if name.endswith(end)), len(_TABLE))
        return table, _ORDER[specs[name].dtype], name

    return sorted(names, key=key)


def _layer_key(name: str) -> tuple[int, ...]:
    if name.startswith(("vision.", "aligner.")):
        return (0,)
    if name.startswith(("embed.", "image_")):
        return (1,)
    if match := re.match(r"layers\.(\d+)\.", name):
        return (5 if ".engram." in name else 2, int(match[1]))
    if match := re.match(r"mtp\.(\d+)\.", name):
        return (4, int(match[1]))
    return (3,)
