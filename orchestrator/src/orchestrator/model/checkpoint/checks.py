"""Do the tensors of a checkpoint fit its configuration? Names first, then dtypes and shapes, with hints.

Most wrong checkpoints would load and then give fluent garbage, so nothing is repaired silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.model.checkpoint.safetensors_file import Entry
from orchestrator.model.checkpoint.specs import Stored, TensorSpec, stored_weights, tensor_specs
from orchestrator.model.config import ModelConfig

# Names of earlier models and of other engines, with what they tell. First match wins.
_FOREIGN = [
    (r"hc_head_|(^|\.)hc_\w+_norm\.weight$", "V4 has these, V4.1 folds them away; this is a V4 checkpoint"),
    (r"\.compressor\.ape$|\.indexer\.compressor\.", "a V4 compressor; this is a V4 checkpoint"),
    (r"\.gate\.tid2eid$", "V4's hash routing; this is a V4 checkpoint"),
    (r"markov_w[12]\b", "V4 spelling of markov_head.embed / markov_head.head; this is a V4 checkpoint"),
    (r"weight_scale_inv$|\.weight_scale$", "another engine's name of .scale; use the published checkpoint"),
    (r"e_score_correction_bias", "another engine's name of gate.bias; use the published checkpoint"),
    (r"(^|\.)self_attn\.|(^|\.)embed_tokens\.|(^|\.)lm_head\.", "another engine's names; use the published checkpoint"),
    (r"^(?!vision\.).*\.mlp\.", "another engine's name of ffn; use the published checkpoint"),
    (r"^module\.", "a converted checkpoint; use the published one"),
    (r"^mtp\.\d+\.(embed|head)\.weight$", "draft stages share the backbone's embed and head; remove it"),
    (r"^(vision\.|aligner\.|image_)", "config.json has no vision_config; add it or remove the image tensors"),
]

_EXPERT = re.compile(r"^(.+\.ffn\.experts)\.(\d+)\.")


def check_tensors(config: ModelConfig, entries: Mapping[str, Entry], where: str | Path) -> None:
    """Raise `CheckpointError` unless `entries` are exactly the tensors that `config` asks for."""
    specs = tensor_specs(config)
    unexpected = sorted(set(entries) - set(specs))
    _check_foreign(unexpected, where)
    _check_experts(specs, entries, where)
    _check_pairs(config, entries, where)
    missing = [name for name in specs if name not in entries]
    if missing:
        raise CheckpointError(f"{where}: lacks {_some(missing)}, which config.json asks for; download all shards")
    if unexpected:
        raise CheckpointError(
            f"{where}: holds {_some(unexpected)}, which config.json does not ask for; weights and config.json must be "
            "of one model"
        )
    for stored in stored_weights(config):
        for name, spec in stored.tensors().items():
            _check_one(stored, name, spec, entries[name], where)


def _check_foreign(unexpected: list[str], where: str | Path) -> None:
    for pattern, hint in _FOREIGN:
        found = [name for name in unexpected if re.search(pattern, name)]
        if found:
            raise CheckpointError(f"{where}: holds {_some(found)}: {hint}")


def _check_experts(specs: Mapping[str, TensorSpec], entries: Mapping[str, Entry], where: str | Path) -> None:
    """Experts of a block are numbered 0 to E-1 without a gap."""
    wanted, found = _expert_ids(specs), _expert_ids(entries)
    for owner, ids in found.items():
        expected = wanted.get(owner)
        if expected is None or ids == expected:
            continue
        gap = sorted(expected - ids)[:4] or sorted(ids - expected)[:4]
        verb = "lacks" if expected - ids else "has"
        raise CheckpointError(
            f"{where}: {owner}: got {len(ids)} experts, allowed is 0 to {len(expected) - 1} without a gap; it {verb} "
            f"{', '.join(map(str, gap))}. Shards of one expert-parallel rank cannot be loaded"
        )


def _expert_ids(names: Mapping[str, object]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name in names:
        if match := _EXPERT.match(name):
            found.setdefault(match[1], set()).add(int(match[2]))
    return found


def _check_pairs(config: ModelConfig, entries: Mapping[str, Entry], where: str | Path) -> None:
    """A quantised weight without its scale (or the reverse) is a half-converted checkpoint."""
    for stored in stored_weights(config):
        if stored.storage in ("fp8", "fp4", "table"):
            weight, scale = f"{stored.name}.weight", f"{stored.name}.scale"
            if (weight in entries) != (scale in entries):
                present, absent = (weight, scale) if weight in entries else (scale, weight)
                raise CheckpointError(f"{where}: holds {present} but not {absent}; a quantised weight needs both")


def _check_one(stored: Stored, name: str, spec: TensorSpec, entry: Entry, where: str | Path) -> None:
    if entry.dtype != spec.dtype:
        raise CheckpointError(
            f"{where}: {name}: got dtype {entry.dtype}, allowed is {spec.dtype}{_dtype_hint(spec, entry)}"
        )
    if entry.shape != spec.shape:
        raise CheckpointError(
            f"{where}: {name}: got shape {list(entry.shape)}, allowed is {list(spec.shape)}"
            f"{_shape_hint(stored, name, entry)}"
        )


def _dtype_hint(spec: TensorSpec, entry: Entry) -> str:
    if spec.dtype == "F8_E8M0":
        return "; a scale keeps the bits of its exponent, a numeric cast destroys them. Convert again with a bit view"
    if spec.dtype == "I8":
        return "; expert weights are two FP4 codes a byte"
    if spec.dtype == "F32" and entry.dtype == "BF16":
        return "; rounding these to BF16 is a real error. Take the original tensor"
    if spec.dtype == "F8_E4M3":
        return "; dequantised weights cannot be loaded, take the original tensor"
    return "; take the original tensor"


def _shape_hint(stored: Stored, name: str, entry: Entry) -> str:
    if not name.endswith(".scale") or stored.storage not in ("fp8", "fp4", "table"):
        return ""
    rows, columns = stored.shape
    covers = {
        "fp8": "one scale covers 32 x 32 weights",
        "fp4": "one scale covers 32 weights of one row, not 32 x 32",
        "table": "one scale covers 32 columns of one row, not 32 x 32",
    }[stored.storage]
    if entry.shape == (-(-rows // 128), -(-columns // 128)):
        return f": {covers}; these are blocks of 128 x 128, as V4 has them"
    return f": {covers}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
