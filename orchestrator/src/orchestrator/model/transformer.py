"""V4.1-Flash: the whole forward of one step, composed from kernel ops. Images come in as embeddings."""

from __future__ import annotations

import torch

from orchestrator.model.attention import Attention, Selection
from orchestrator.model.batch import Rows, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.dense import DenseMode, dense
from orchestrator.model.engram import Engram, LookBack
from orchestrator.model.engram_tables import EngramTables
from orchestrator.model.moe import Moe
from orchestrator.model.record import StepRecorder
from orchestrator.model.rope import RopeTable, inverse_frequencies
from orchestrator.model.streams import Streams
from orchestrator.model.taps import Taps
from orchestrator.model.transfer import to_device
from orchestrator.model.weights import ModelWeights


class Transformer:
    """Weights bound to ops. Holds no request state: that is in `CachePools` and in the batch.

    Attributes:
        device: where weights are and everything is computed.
    """

    def __init__(self, weights: ModelWeights, tables: EngramTables, *, mode: DenseMode = "fixed") -> None:
        config = weights.config
        self.config, self.weights, self.tables = config, weights, tables
        self.device = weights.embed.device
        self.ratios = tuple(sorted({config.ratio(s) for s in config.kv_source_layer_ids}))
        layers = list(enumerate(weights.layers))
        self.attention = [Attention(config, i, w, mode) for i, w in layers]
        self.moe = [Moe(config, i, w, mode, config.num_experts_per_tok) for i, w in layers]
        self.engram = {i: Engram(config, i, w.engram, tables, mode) for i, w in layers if w.engram is not None}
        self.head = dense(weights.head, mode)
        rd = config.qk_rope_head_dim
        self.rope_window_only = RopeTable(inverse_frequencies(rd, config.rope_theta), self.device)
        self.rope_compressed = RopeTable(
            inverse_frequencies(
                rd,
                config.compress_rope_theta,
                factor=config.rope_factor,
                beta_fast=config.beta_fast,
                beta_slow=config.beta_slow,
                original_max_position=config.original_max_position_embeddings,
            ),
            self.device,
        )

    def reserve_positions(self, count: int) -> None:
        """Make the rotary rows of the first `count` positions, so that steps below it leave the tables in place."""
        for table in (self.rope_window_only, self.rope_compressed):
            table.reserve(count - 1)

    @property
    def expert_parallel(self) -> bool:
        """Whether experts are on several ranks (`orchestrator.model.expert_parallel`)."""
        return any(moe.parallel is not None for moe in self.moe)

    def join(self, first: int) -> None:
        """Take part without a token in the collectives of the layers from `first` on: no rank may skip one."""
        for moe in self.moe[first:]:
            if moe.parallel is not None:
                moe.parallel.join()

    def forward(
        self,
        batch: StepBatch,
        cache: CachePools,
        recorder: StepRecorder | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """Compute a step: write its cache rows and return logits float32 [len(batch.logit_rows), vocab].

        `taps`, a fresh one for each step, receives what the draft stages read. A batch on the host is copied to the
        model's device first. Nothing waits for a GPU but a recorder.
        """
        batch = to_device(batch, self.device)
        config, first_decoder = self.config, self.config.encoder_layers
        rows, is_image = batch.encoder, batch.is_image
        streams = Streams(config, self._embedded(batch))
        look = LookBack(batch, self.tables)
        ropes = self._ropes(rows, batch)
        group_rope = {
            ratio: self.rope_compressed.rows(at, batch.highest) for ratio, at in batch.group_positions.items()
        }
        selection = Selection()
        if recorder is not None:
            recorder.add("tokens", batch.tokens, rows.positions, rows.owner)
        for layer, weights in enumerate(self.weights.layers):
            if layer in self.engram:
                self.engram[layer](streams.settle(), look)
            attention = self.attention[layer]
            if layer == first_decoder and batch.kept is not None:
                # Every token's global rows are made here; only the kept rows go on.
                x = streams.enter(weights.hc_attn, weights.attn_norm)
                attention.write_global(x, batch, cache, group_rope[attention.ratio], recorder)
                streams.keep(batch.kept)
                x = x.index_select(0, batch.kept)
                rows = batch.decoder
                is_image = None if is_image is None else is_image.index_select(0, batch.kept)
                ropes = self._ropes(rows, batch)
                if rows.count == 0:
                    self.join(layer)
                    break
            else:
                if layer == first_decoder:
                    rows = batch.decoder
                x = streams.enter(weights.hc_attn, weights.attn_norm)
                if attention.is_full:
                    attention.write_global(x, batch, cache, group_rope[attention.ratio], recorder)
            if taps is not None and layer in taps.layers:
                taps.take(streams.settle())
            rope = ropes[0] if attention.ratio == 0 else ropes[1]
            streams.leave(attention(x, rows, batch, cache, rope, selection, recorder))
            x = streams.enter(weights.hc_ffn, weights.ffn_norm)
            streams.leave(self.moe[layer](x, is_image, rows, recorder))
        if taps is not None:
            taps.close(rows, batch.slots, batch.highest)
        return self._logits(streams, rows, batch, recorder)

    def _embedded(self, batch: StepBatch) -> torch.Tensor:
        """float32 [T, hidden]: the tokens' rows, and inside image spans what the image encoder made of them."""
        rows = self.weights.embed[batch.tokens].float()
        if batch.image_at is not None and batch.image_rows is not None:
            rows.index_copy_(0, batch.image_at, batch.image_rows.float())
        return rows

    def _ropes(self, rows: Rows, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self.rope_window_only.rows(rows.positions, batch.highest),
            self.rope_compressed.rows(rows.positions, batch.highest),
        )

    def _logits(self, streams: Streams, rows: Rows, batch: StepBatch, recorder: StepRecorder | None) -> torch.Tensor:
        wanted = batch.logit_rows
        if wanted.numel() == 0:
            return torch.empty(0, self.config.vocab_size, device=self.device)
        if wanted.numel() < rows.count:
            streams.keep(wanted)
        logits = self.head(streams.collapse(self.weights.norm))
        if recorder is not None:
            recorder.add("logits", logits, rows.positions[wanted], rows.owner[wanted])
        return logits
