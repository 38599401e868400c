"""Names for what both sides have to have in common: the weights, and the meaning of rows."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from orchestrator.cache.chain import framed
from orchestrator.cache.layout import BlockLayout
from orchestrator.model.cache import CachePools
from orchestrator.model.transformer import Transformer

_SAMPLED_ROWS = 16


def model_id(model: Transformer, name: bytes = b"") -> bytes:
    """32 bytes by the configuration, all norms, sinks and router biases, and a few rows of the embedding.

    The same wherever the weights are and however experts are packed. Weights that differ in other tensors alone need a
    `name`, for instance the digest of the checkpoint.
    """
    digest = hashlib.sha256(framed(b"fathom-model/1", name, repr(model.config).encode()))
    for path, values in _small_tensors(model.weights):
        digest.update(framed(path.encode(), _bytes(values)))
    embed = model.weights.embed
    rows = torch.linspace(0, embed.shape[0] - 1, min(_SAMPLED_ROWS, embed.shape[0])).long()
    digest.update(framed(_bytes(embed[rows.to(embed.device)])))
    return digest.digest()


def wire_tag(cache: CachePools) -> bytes:
    """32 bytes that name the meaning of all rows that travel: blocks at rest, rings, tails."""
    config = cache.config
    layout = BlockLayout.of(config, quantised=cache.quantised)
    rings = f"{config.num_hidden_layers} rings {tuple(cache.rings.shape[2:])} {cache.rings.dtype}"
    tails = "; ".join(f"tail {layer} {tuple(t.shape[1:])} {t.dtype}" for layer, t in cache.tails.items())
    return hashlib.sha256(framed(b"fathom-handoff-rows/1", layout.tag, rings.encode(), tails.encode())).digest()


def _small_tensors(weights: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """float32 vectors of dataclasses and lists of them; experts are left out, since devices keep them differently."""
    if isinstance(weights, torch.Tensor):
        if weights.dtype == torch.float32 and weights.ndim == 1:
            yield path, weights
    elif isinstance(weights, list):
        for number, item in enumerate(weights):
            yield from _small_tensors(item, f"{path}.{number}")
    elif dataclasses.is_dataclass(weights):
        for field in dataclasses.fields(weights):
            if field.name not in ("config", "experts", "packed", "engram"):
                yield from _small_tensors(getattr(weights, field.name), f"{path}.{field.name}")


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().cpu().view(torch.uint8).numpy().tobytes()
