"""One layer's attention: projections, window and global rows, selection, the sparse softmax, grouped output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import mla_fp4
import swa_replay
from orchestrator.model.batch import Rows, StepBatch
from orchestrator.model.cache import CachePools, GlobalPool
from orchestrator.model.config import ModelConfig
from orchestrator.model.dense import DenseMode, dense, grouped
from orchestrator.model.record import StepRecorder
from orchestrator.model.weights import Layer


@dataclass
class Selection:
    """Top-k compressed positions (int32 [T, k]) and, in the decoder, the candidate blocks (int32 [T, C]).

    Filled by the first layer that selects; every layer that reads compressed rows stands at or above one.
    """

    indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    candidates: torch.Tensor | None = None


class Attention:
    """Compressed sparse attention of one layer (Full, Reindex, Reuse or window-only, by the configuration)."""

    def __init__(self, config: ModelConfig, layer: int, weights: Layer, mode: DenseMode) -> None:
        self.config, self.layer = config, layer
        self.eps = config.rms_norm_eps
        self.ratio = config.ratio(layer)
        self.source = config.kv_source(layer) if self.ratio else None
        self.is_full = config.is_full(layer)
        self.selects = self.is_full or config.is_reindex(layer)
        self.scale = config.head_dim**-0.5
        self.head_weight_scale = (config.index_head_dim * config.index_n_heads) ** -0.5

        self.q_norm, self.kv_norm, self.sink = weights.q_norm, weights.kv_norm, weights.sink
        self.wq_a, self.wq_b = dense(weights.wq_a, mode), dense(weights.wq_b, mode)
        self.wkv, self.wo_b = dense(weights.wkv, mode), dense(weights.wo_b, mode)
        self.wo_a = grouped(weights.wo_a, config.o_groups, mode)
        if self.is_full:
            assert weights.compressor is not None and weights.indexer is not None
            compressor, indexer = weights.compressor, weights.indexer
            self.compressor_norm = compressor.norm
            self.compressor_wkv = dense(compressor.wkv, mode)
            self.compressor_gate = None if compressor.wgate is None else dense(compressor.wgate, mode)
            assert indexer.wk is not None
            self.index_wk, self.index_k_norm = dense(indexer.wk, mode), indexer.k_norm
        if self.selects:
            assert weights.indexer is not None
            self.index_wq, self.index_heads = (
                dense(weights.indexer.wq_b, mode),
                dense(weights.indexer.weights_proj, mode),
            )

    def write_global(
        self, x: torch.Tensor, batch: StepBatch, cache: CachePools, rope: torch.Tensor, recorder: StepRecorder | None
    ) -> None:
        """Make the main rows and index keys of every group that this step completes (Full layers).

        `x` float32 [T, hidden], all rows of the step, also those that skip the decoder. `rope` float32 [groups, rd],
        at each group's first token.
        """
        pool = cache.pools[self.layer]
        latent = self.compressor_wkv(x)
        if self.compressor_gate is not None:
            gate = self.compressor_gate(x)
            tail = cache.tails[self.layer]
            latent = mla_fp4.compress(
                latent, gate, tail, batch.slots, batch.encoder.cu_seqlens, batch.encoder.start_pos,
                groups=batch.group_positions[self.ratio].shape[0],
            )  # fmt: skip
        if latent.shape[0] == 0:
            return
        latent = mla_fp4.norm_rope(latent, self.compressor_norm, self.eps, None, out=latent)
        quantise = cache.quantised
        main = mla_fp4.kv_rows(latent, None, self.eps, rope, format="main", quantize=quantise)
        raw_key = self.index_wk(latent)
        key = mla_fp4.kv_rows(raw_key, self.index_k_norm, self.eps, rope, format="index", quantize=quantise)
        slots = batch.global_slots[self.ratio]
        mla_fp4.store_main(main, pool.main, slots)
        mla_fp4.store_index(key, pool.index, slots, pool.rows_per_block)
        if cache.wrote is not None:
            cache.wrote(self.layer, batch)
        if recorder is not None:
            written = slots >= 0
            positions = batch.group_positions[self.ratio][written]
            owner = batch.group_owner[self.ratio][written]
            recorder.add(f"main/{self.layer}", main[written], positions, owner)
            recorder.add(f"index/{self.layer}", key[written], positions, owner)
            if recorder.analysis:
                key = mla_fp4.kv_rows(raw_key, self.index_k_norm, self.eps, rope, format="index", quantize=False)
                recorder.add(f"index_values/{self.layer}", key[written], positions, owner)

    def __call__(
        self,
        x: torch.Tensor,
        rows: Rows,
        batch: StepBatch,
        cache: CachePools,
        rope: torch.Tensor,
        selection: Selection,
        recorder: StepRecorder | None,
    ) -> torch.Tensor:
        """float32 [T, hidden] -> float32 [T, hidden]; the layer's global rows of this step are already written."""
        config = self.config
        c_q, q = self.query(x, rope)
        window = self.window_rows(x, rope, cache.quantised)
        ring = cache.rings[self.layer]
        geometry = (ring, batch.slots, rows.cu_seqlens, rows.start_pos, rows.lower, config.sliding_window)
        if self.source is None:
            out = swa_replay.window_attention(q, window, *geometry, self.sink, rope, self.scale)
        else:
            pool = cache.pools[self.source]
            if self.selects:
                self._select(x, c_q, rows, batch, pool, rope, selection, recorder)
                if recorder is not None:
                    recorder.add(f"topk/{self.layer}", selection.indices, rows.positions, rows.owner)
                    if recorder.analysis:
                        recorder.add(f"query/{self.layer}", q, rows.positions, rows.owner)
                    if self.layer == config.candidate_source_layer_id and selection.candidates is not None:
                        recorder.add(f"candidates/{self.layer}", selection.candidates, rows.positions, rows.owner)
            out = mla_fp4.sparse_attention(
                q,
                window,
                *geometry,
                pool.main,
                pool.rows_per_block,
                batch.block_table,
                selection.indices,
                self.sink,
                rope,
                self.scale,
            )
        # After the read: a chunk longer than the ring would overwrite rows that its own first tokens need.
        swa_replay.store_window(window, ring, batch.slots, rows.cu_seqlens, rows.start_pos, rows.lower)
        if recorder is not None:
            recorder.add(f"window/{self.layer}", window, rows.positions, rows.owner)
        return self.output(out)

    def query(self, x: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Low-rank query float32 [T, q_lora_rank] and the rotated heads [T, H, D] of x float32 [T, hidden]."""
        c_q = self.wq_a(x)
        c_q = mla_fp4.norm_rope(c_q, self.q_norm, self.eps, None, out=c_q)
        q = self.wq_b(c_q).view(x.shape[0], self.config.num_attention_heads, self.config.head_dim)
        return c_q, mla_fp4.norm_rope(q, None, self.eps, rope, out=q)

    def window_rows(self, x: torch.Tensor, rope: torch.Tensor, quantised: bool) -> torch.Tensor:
        """The window row of each x float32 [T, hidden]: uint8 [T, row], or float32 [T, D] without quantisation."""
        return mla_fp4.kv_rows(self.wkv(x), self.kv_norm, self.eps, rope, format="window", quantize=quantised)

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        """The two output projections: float32 [T, H, D] -> [T, hidden]."""
        count, groups = heads.shape[0], self.config.o_groups
        z = self.wo_a(heads.view(count, groups, -1))
        return self.wo_b(z.view(count, -1))

    def _select(
        self,
        x: torch.Tensor,
        c_q: torch.Tensor,
        rows: Rows,
        batch: StepBatch,
        pool: GlobalPool,
        rope: torch.Tensor,
        selection: Selection,
        recorder: StepRecorder | None,
    ) -> None:
        config = self.config
        q = self.index_wq(c_q).view(-1, config.index_n_heads, config.index_head_dim)
        q = mla_fp4.norm_rope(q, None, self.eps, rope, out=q)
        head_weights = self.index_heads(x).mul_(self.head_weight_scale)
        if recorder is not None and recorder.analysis:
            recorder.add(f"index_query/{self.layer}", q, rows.positions, rows.owner)
            recorder.add(f"index_heads/{self.layer}", head_weights, rows.positions, rows.owner)
        publishes = self.layer == config.candidate_source_layer_id
        selection.indices, blocks = mla_fp4.index_topk(
            q,
            head_weights,
            pool.index,
            pool.rows_per_block,
            batch.block_table,
            rows.cu_seqlens,
            rows.visible[self.ratio],
            config.index_topk,
            candidates=selection.candidates if config.uses_candidates(self.layer) else None,
            candidate_block=config.candidate_block_size,
            publish_blocks=config.candidate_topk_blocks if publishes else 0,
            longest=rows.longest,
        )
        if publishes:
            selection.candidates = blocks
