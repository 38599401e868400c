"""Engram for training: hashed n-gram rows, gated into the streams (docs/model.md, Engram)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from orchestrator.model.config import ModelConfig
from orchestrator.train.fused import fused
from orchestrator.train.lookup import lookup


class EngramHash:
    """Constants of the hash, as `engram.npz` of a dataset holds them, and the rows of a sequence's tokens."""

    def __init__(self, config: ModelConfig, constants: dict[str, np.ndarray]) -> None:
        self._config = config
        self._constants = {name: torch.from_numpy(np.asarray(value)) for name, value in constants.items()}
        self._pad = int(constants["mapped_pad"])
        size = self._constants["token_map"].numel()
        if size != config.vocab_size:
            raise ValueError(f"engram: got a token map of {size} ids, allowed is vocab_size ({config.vocab_size})")

    def _on(self, device: torch.device) -> dict[str, torch.Tensor]:
        if self._constants["token_map"].device != device:
            self._constants = {name: value.to(device) for name, value in self._constants.items()}
        return self._constants

    def rows(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """Table rows int64 [B, S, columns] of tokens int64 [B, S] from position 0 on; 2-grams first."""
        c = self._on(tokens.device)
        heads, pad = self._config.engram_n_heads, self._pad
        mapped = c["token_map"][tokens]
        m, primes, offsets = (c[f"{part}.{layer}"] for part in ("multipliers", "primes", "offsets"))
        mixed, columns = mapped * m[0], []
        for shift in range(1, self._config.engram_max_ngram_size):
            before = F.pad(mapped, (shift, 0), value=pad)[:, : mapped.shape[1]]
            mixed = mixed ^ (before * m[shift])
            at = slice((shift - 1) * heads, shift * heads)
            columns.append(mixed[..., None] % primes[at] + offsets[at])
        return torch.cat(columns, -1)


@fused
def _inject(x: torch.Tensor, kv: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    n, d = x.shape[-2:]
    kv = kv.float().unflatten(-1, (n + 1, d))
    key, value = kv[..., :n, :], kv[..., n:, :]
    scale = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * d**-0.5
    dot = (x * weight * key).sum(-1) * scale
    gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
    return x + gate[..., None] * value


def inject(w: dict[str, torch.Tensor], x: torch.Tensor, rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """X float32 [T, n, d] with the gated rows (int64 [T, columns]) added."""
    embedded = lookup(w["engram.embed"], rows).flatten(-2)
    kv = F.linear(embedded, w["engram.wkv"])
    return _inject(x, kv, w["engram.q_weight"].float() * w["engram.k_weight"].float(), config.rms_norm_eps)
