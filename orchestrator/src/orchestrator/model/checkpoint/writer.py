"""Writes a checkpoint folder: config.json, safetensors files, and an index where there are several."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kernel_core.check import require
from orchestrator.model.checkpoint.layout import Placement, header, place
from orchestrator.model.checkpoint.reader import INDEX
from orchestrator.model.checkpoint.specs import TensorSpec, tensor_specs
from orchestrator.model.config import ModelConfig

_TORCH: dict[str, tuple[torch.dtype, ...]] = {
    "F32": (torch.float32,),
    "BF16": (torch.bfloat16,),
    "F8_E4M3": (torch.float8_e4m3fn,),
    "F8_E8M0": (torch.uint8, torch.float8_e8m0fnu),
    "I8": (torch.uint8, torch.int8),
}

Source = Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]


def write_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    source: Source,
    *,
    placement: Placement = "single",
    overwrite: bool = False,
) -> None:
    """Write all tensors of `config`; the same input gives the same bytes.

    `source` maps a name to its stored tensor (scales and FP4 codes as uint8), or makes it on demand: it is asked once
    for each name, those of one weight right after one another, and holds one tensor at a time. Files appear under
    their names when all are complete. Raises `ValueError` for missing, surplus or misshaped tensors, and when the
    folder already holds weights and `overwrite` is false.
    """
    folder = Path(folder)
    specs = tensor_specs(config)
    if isinstance(source, Mapping):
        _check_mapping(specs, source)
    old = [*folder.glob("*.safetensors"), *folder.glob(INDEX)]
    require(overwrite or not old, "folder", f"{folder}, which holds weights", "an empty folder, or overwrite=True")
    files = place(specs, placement)

    folder.mkdir(parents=True, exist_ok=True)
    partial = {file: folder / f".{file}.partial" for file in files}
    try:
        for file, names in files.items():
            write_file(partial[file], specs, names, source)
    except BaseException:
        for path in partial.values():
            path.unlink(missing_ok=True)
        raise
    for path in old:
        path.unlink()
    for file, path in partial.items():
        os.replace(path, folder / file)
    write_config(folder, config)
    if len(files) > 1 or placement != "single":
        total = sum(spec.nbytes for spec in specs.values())
        places = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def write_config(folder: str | Path, config: ModelConfig) -> None:
    """Write config.json of a checkpoint folder, at once or not at all."""
    write_json(Path(folder) / "config.json", config.to_hf())


def _check_mapping(specs: Mapping[str, TensorSpec], source: Mapping[str, torch.Tensor]) -> None:
    missing, surplus = sorted(set(specs) - set(source)), sorted(set(source) - set(specs))
    require(not missing, "source", f"no {missing[:1]} (and {len(missing) - 1} more)", "every tensor of the config")
    require(not surplus, "source", f"{surplus[:1]} (and {len(surplus) - 1} more)", "only tensors of the config")
    for name, tensor in source.items():
        _check_tensor(name, specs[name], tensor)


def _check_tensor(name: str, spec: TensorSpec, tensor: torch.Tensor) -> None:
    allowed = _TORCH[spec.dtype]
    require(tensor.dtype in allowed, name, tensor.dtype, " or ".join(map(str, allowed)))
    require(tuple(tensor.shape) == spec.shape, name, f"shape {list(tensor.shape)}", f"{list(spec.shape)}")


def write_file(path: Path, specs: Mapping[str, TensorSpec], names: list[str], source: Source) -> None:
    """Write one safetensors file with `names`, in this order, in it.

    Tensors are asked for by name order, where a weight and its scale are neighbours, and put where they belong."""
    head, begins = header(specs, names)
    get = source.__getitem__ if isinstance(source, Mapping) else source
    with path.open("wb") as file:
        file.write(head)
        for name in sorted(names):
            tensor = get(name)
            _check_tensor(name, specs[name], tensor)
            if tensor.numel():
                file.seek(begins[name])
                file.write(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().numpy().data)


def write_json(path: Path, values: object) -> None:
    """Write a JSON file at once or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
