"""From trained tensors to a checkpoint folder in the official layout, and back.

Trained tensors have checkpoint names, with the routed experts of a layer stacked: `layers.3.ffn.experts.w1`
[E, inter, d] here is `layers.3.ffn.experts.0.w1` and on there. Nothing else differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch

from kernel_core.check import require
from kernel_core.formats import dequantize_fp8_block, dequantize_fp8_rows, dequantize_mxfp4
from orchestrator.model.checkpoint.checks import check_tensors
from orchestrator.model.checkpoint.encode import encode
from orchestrator.model.checkpoint.layout import Placement
from orchestrator.model.checkpoint.reader import Checkpoint
from orchestrator.model.checkpoint.specs import Stored, stored_weights
from orchestrator.model.checkpoint.writer import write_checkpoint
from orchestrator.model.config import ModelConfig

_EXPERT = re.compile(r"(.+\.ffn\.experts)\.(\d+)\.(w\d)")

Decode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_DECODE: dict[str, Decode] = {"fp8": dequantize_fp8_block, "fp4": dequantize_mxfp4, "table": dequantize_fp8_rows}


def export_checkpoint(
    tensors: Mapping[str, torch.Tensor],
    config: ModelConfig,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    placement: Placement = "capped",
    overwrite: bool = False,
) -> ModelConfig:
    """Write `config.json`, the quantised weights in files of at most 15 MiB, and the tokenizer; returns the config.

    `tokenizer` is the path of a tokenizer.json, None the one bundled for the vocabulary's size;
    `engram_compressed_vocab_size` becomes that of its map. Raises `ValueError`, before anything is written, for
    tensors that are missing, surplus, misshaped or not finite, and if `folder` holds weights and not `overwrite`.
    """
    from orchestrator.model.engram_tables import check_engram_rows, compressed_vocab_size

    check_engram_rows(config)
    text = _tokenizer_text(tokenizer, config)
    if config.engram_layer_ids:
        size = compressed_vocab_size(tokenizers.Tokenizer.from_str(text), config.vocab_size)
        config = replace(config, engram_compressed_vocab_size=size)
    encoded = encode_tensors(tensors, config)
    write_checkpoint(folder, config, encoded, placement=placement, overwrite=overwrite)
    _write_tokenizer(Path(folder), config, text)
    return config


def encode_tensors(tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Stored tensors by name, experts unstacked. Raises `ValueError` for names or shapes that are not `config`'s."""
    wanted = dict(_stacked_shapes(config))
    missing, surplus = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    require(not missing, "tensors", f"no {missing[:1]} (and {len(missing) - 1} more)", "every tensor of the config")
    require(not surplus, "tensors", f"{surplus[:1]} (and {len(surplus) - 1} more)", "only tensors of the config")
    for name, shape in wanted.items():
        got = tuple(tensors[name].shape)
        require(got == shape, name, f"shape {list(got)}", f"{list(shape)}")
    encoded: dict[str, torch.Tensor] = {}
    for stored in stored_weights(config):
        encoded |= encode(stored, _values(tensors, stored.name).detach().to("cpu", torch.float32))
    return encoded


def import_checkpoint(folder: str | Path) -> dict[str, torch.Tensor]:
    """Trained tensors of a checkpoint: dequantised to float32, experts stacked. Raises `CheckpointError`."""
    checkpoint = Checkpoint(folder)
    check_tensors(checkpoint.config, checkpoint.entries, checkpoint.folder)
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for stored in stored_weights(checkpoint.config):
        value = _decoded(checkpoint, stored)
        if match := _EXPERT.fullmatch(stored.name):
            experts.setdefault(f"{match[1]}.{match[3]}", []).append(value)
        else:
            tensors[stored.name] = value
    return tensors | {name: torch.stack(values) for name, values in experts.items()}


def without_drafter(config: ModelConfig) -> ModelConfig:
    """The same model without draft stages, for a backbone that is exported alone."""
    ratios = config.compress_ratios[: config.num_hidden_layers]
    return replace(config, num_nextn_predict_layers=0, compress_ratios=ratios, draft_length=0)


def _stacked_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for stored in stored_weights(config):
        if match := _EXPERT.fullmatch(stored.name):
            name = f"{match[1]}.{match[3]}"
            shapes[name] = (int(match[2]) + 1, *stored.shape)  # experts come in ascending order
        else:
            shapes[stored.name] = stored.shape
    return shapes


def _values(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if match := _EXPERT.fullmatch(name):
        return tensors[f"{match[1]}.{match[3]}"][int(match[2])]
    return tensors[name]


def _decoded(checkpoint: Checkpoint, stored: Stored) -> torch.Tensor:
    if stored.storage in _DECODE:
        weight, scale = (checkpoint.read(f"{stored.name}.{part}") for part in ("weight", "scale"))
        return _DECODE[stored.storage](weight, scale)
    return checkpoint.read(stored.name).to(torch.float32)


def _tokenizer_text(path: str | Path | None, config: ModelConfig) -> str:
    """Contents of the tokenizer.json that goes with the weights."""
    from orchestrator.text import specials
    from orchestrator.text.files import bundled_tokenizer
    from orchestrator.text.tokenizer import load_tokenizer

    if path is not None:
        tokenizer = load_tokenizer(path)
    else:
        sizes = {size: name for name, size in specials.SMALL_VOCABULARIES.items()}
        allowed = f"{' or '.join(map(str, sizes))} where no tokenizer is given"
        require(config.vocab_size in sizes, "config.vocab_size", config.vocab_size, allowed)
        tokenizer = bundled_tokenizer(sizes[config.vocab_size])
    size = tokenizer.vocab_size
    require(size == config.vocab_size, "tokenizer", f"{size} ids", f"vocab_size ({config.vocab_size})")
    return tokenizer.text


def _write_tokenizer(folder: Path, config: ModelConfig, text: str) -> None:
    from orchestrator.text.files import tokenizer_config
    from orchestrator.text.tokenizer import TOKENIZER_FILE

    (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    settings = json.dumps(tokenizer_config(config.max_position_embeddings), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")
