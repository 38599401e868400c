"""Engram at one layer: hash the last tokens, look rows up, gate them into the streams."""

from __future__ import annotations

import torch

import mhc_engram
from orchestrator.model.batch import NO_TOKEN, StepBatch
from orchestrator.model.config import ModelConfig
from orchestrator.model.dense import DenseMode, dense
from orchestrator.model.engram_tables import EngramTables
from orchestrator.model.weights import Engram as EngramWeights


class Engram:
    def __init__(
        self, config: ModelConfig, layer: int, weights: EngramWeights, tables: EngramTables, mode: DenseMode
    ) -> None:
        self.eps = config.rms_norm_eps
        self.table, self.table_scale, self.qk_weight = weights.table, weights.table_scale, weights.qk_weight
        self.wkv = dense(weights.wkv, mode)
        self.hash = tables.layer(layer)
        self.pad = tables.mapped_pad

    def __call__(self, x: torch.Tensor, look: LookBack) -> None:
        """Add the gated rows to X float32 [T, n, hidden], in place."""
        h = self.hash
        rows = mhc_engram.engram_rows(
            look.mapped, look.dead, look.history, look.cu_seqlens, h.multipliers, h.primes, h.offsets, self.pad
        )
        embedded = mhc_engram.engram_gather(self.table, self.table_scale, rows)
        mhc_engram.engram_inject(x, self.wkv(embedded), self.qk_weight, look.dead, self.eps)


class LookBack:
    """Mapped token ids of a step's rows and of the three tokens before each chunk.

    `mapped` int64 [T], `dead` bool [T] (image positions), `history` int64 [B, 3] (start-1, start-2, start-3; -1 where
    there is none or an image stands).
    """

    def __init__(self, batch: StepBatch, tables: EngramTables) -> None:
        token_map = tables.token_map
        self.mapped = token_map.index_select(0, batch.tokens)
        none = torch.zeros_like(batch.tokens, dtype=torch.bool)
        self.dead = none if batch.is_image is None else batch.is_image
        self.cu_seqlens = batch.encoder.cu_seqlens
        before = batch.history
        self.history = token_map[before.clamp(min=0)].masked_fill_(before == NO_TOKEN, NO_TOKEN)
