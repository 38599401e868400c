"""The text forward pass in float64, layer by layer over all rows at once (docs/model.md, Forward pass)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import attention, compressor, engram, indexer, mhc, moe
from .choices import Own, used
from .config import Config, read_config
from .formats import INDEX, MAIN, WINDOW
from .rope import Rope
from .trace import Replay, Trace
from .weights import Stored, Weights, read_tensors


class Oracle:
    """A model to judge implementations with.

    `source` is a checkpoint folder or (Config, tensors by name). `token_map` int[vocab] is the Engram token map; it may
    be left out where the compressed vocabulary is the whole one. `dtype` float32 makes a noisy twin for tests.
    """

    def __init__(
        self,
        source: str | Path | tuple[Config, Mapping[str, Stored]],
        *,
        token_map: np.ndarray | None = None,
        dtype: type = np.float64,
    ):
        config, tensors = source if isinstance(source, tuple) else (read_config(source), read_tensors(source))
        self.config = config
        self.weights = Weights(tensors, dtype)
        self.rope = Rope(config)
        self.hasher = engram.Hasher(config, token_map)

    def forward(
        self,
        token_ids: Any,
        *,
        image_mask: np.ndarray | None = None,
        embeddings: np.ndarray | None = None,
        cache: str = "quantised",
        decoder_tail: int | None = None,
        encoder_replay: Replay | None = None,
    ) -> Trace:
        """Runs a whole sequence.

        image_mask bool[N] marks image spans, embeddings [N, d] replaces the embedding rows of marked positions.
        decoder_tail K runs the decoder on the last K rows only; None runs all rows. encoder_replay starts one window
        before its hit, with the global rows of a cold run.
        """
        tokens = np.asarray(token_ids, np.int64)
        start, hit = 0, 0
        if encoder_replay is not None:
            hit = encoder_replay.hit
            start = hit - self.config.sliding_window
            if start <= 0 or hit >= len(tokens):
                raise ValueError(
                    f"hit is {hit}, allowed is more than the window and less than the {len(tokens)} tokens"
                )
        decoder_start = start if decoder_tail is None else max(start, len(tokens) - decoder_tail)
        choices = Own(self.config, cache)
        return self.run(tokens, choices, start, decoder_start, encoder_replay, image_mask, embeddings)

    def follow(self, record: Mapping[str, np.ndarray], **options: Any):
        """Judges an implementation's export and continues with its choices; see `follow.follow`."""
        from .follow import follow

        return follow(self, record, **options)

    def run(
        self,
        tokens: np.ndarray,
        choices: Own,
        start: int,
        decoder_start: int,
        replay: Replay | None = None,
        image_mask: np.ndarray | None = None,
        embeddings: np.ndarray | None = None,
    ) -> Trace:
        """Rows start..N-1 through the encoder, decoder_start..N-1 through the decoder, with the given choices."""
        config, weights = self.config, self.weights
        if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= config.vocab_size:
            raise ValueError(
                f"token ids: {len(tokens)} of them, allowed is one or more within 0..{config.vocab_size - 1}"
            )
        dead = np.zeros(len(tokens), bool) if image_mask is None else np.asarray(image_mask, bool)
        trace = Trace(tokens)
        pos = np.arange(start, len(tokens))
        hidden = weights.matrix("embed")[tokens[pos]]
        if embeddings is not None:
            hidden = np.where(dead[pos, None], embeddings[pos], hidden)
        streams = np.repeat(hidden[:, None, :], config.hc_mult, axis=1)
        pre = np.zeros((len(pos), config.hc_mult), streams.dtype)
        pre[:, 0] = 1
        taps = []
        for layer in range(config.num_hidden_layers):
            if layer in config.engram_layer_ids:
                rows = self.hasher.rows(layer, tokens, dead)[pos]
                streams = engram.inject(config, weights, layer, streams, rows)
            if layer == config.decoder_start_layer:
                # The global rows of the decoder's source are made of every row, all else of the tail only.
                self.write_global(trace, choices, layer, self.normed(layer, "attn", streams, pre), pos, replay)
                kept = pos >= decoder_start
                pos, streams, pre = pos[kept], streams[kept], pre[kept]
            trace.positions[layer], trace.streams[layer] = pos, streams
            if layer in config.dspark_target_layer_ids:
                taps.append(streams.mean(1))

            next_pre, post, comb = mhc.coefficients(config, weights, f"layers.{layer}.hc_attn", streams)
            x = self.normed(layer, "attn", streams, pre)
            if layer in config.kv_source_layer_ids and layer != config.decoder_start_layer:
                self.write_global(trace, choices, layer, x, pos, replay)
            y = self.attention(trace, choices, layer, x, pos)
            streams, pre = mhc.update(streams, y, post, comb), next_pre

            next_pre, post, comb = mhc.coefficients(config, weights, f"layers.{layer}.hc_ffn", streams)
            y = self.ffn(trace, choices, layer, self.normed(layer, "ffn", streams, pre), pos, dead[pos])
            streams, pre = mhc.update(streams, y, post, comb), next_pre

        trace.final_streams = streams
        trace.taps = np.concatenate(taps, -1)
        trace.logits_positions = pos
        last = mhc.rms_norm(mhc.mix(streams, pre), weights.plain("norm.weight"), config.rms_norm_eps)
        trace.logits = last @ weights.matrix("head").T
        return trace

    def normed(self, layer: int, half: str, streams: np.ndarray, pre: np.ndarray) -> np.ndarray:
        norm = self.weights.plain(f"layers.{layer}.{half}_norm.weight")
        return mhc.rms_norm(mhc.mix(streams, pre), norm, self.config.rms_norm_eps)

    def write_global(
        self, trace: Trace, choices: Own, layer: int, x: np.ndarray, pos: np.ndarray, replay: Replay | None
    ) -> None:
        """Main and index rows of every group that is complete and whose last token is not below the hit."""
        config = self.config
        ratio, hit = config.compress_ratios[layer], 0 if replay is None else replay.hit
        first, end = hit // ratio, (int(pos[-1]) + 1) // ratio
        groups = np.arange(first, end)
        member = groups[:, None] * ratio + np.arange(ratio) - pos[0]
        kv, gate = compressor.project(config, self.weights, layer, x)
        freqs = self.rope.of_layer(ratio)
        main, index = compressor.rows_of_groups(config, self.weights, layer, kv[member], gate[member], groups, freqs)
        trace.first_group[layer] = first
        trace.main_values[layer], trace.index_values[layer] = main, index
        main, index = choices.main_rows(layer, groups, main), choices.index_rows(layer, groups, index)
        if replay is not None:
            main = np.concatenate([replay.main_rows[layer][:first], main])
            index = np.concatenate([replay.index_rows[layer][:first], index])
        trace.main_rows[layer], trace.index_rows[layer] = main, index

    def attention(self, trace: Trace, choices: Own, layer: int, x: np.ndarray, pos: np.ndarray) -> np.ndarray:
        config, weights, dtype = self.config, self.weights, self.weights.dtype
        prefix, ratio = f"layers.{layer}.attn", config.compress_ratios[layer]
        freqs = self.rope.of_layer(ratio)
        c_q, q = attention.query(config, weights, prefix, x, pos, freqs)
        trace.window_values[layer] = attention.window_values(config, weights, prefix, x, pos, freqs)
        trace.window_rows[layer] = choices.window_rows(layer, pos, trace.window_values[layer])
        window_keys = used(trace.window_rows[layer], WINDOW, dtype)
        if ratio:
            if layer in config.index_source_layer_ids:
                self.select(trace, choices, layer, x, c_q, pos, freqs)
            selected = trace.topk[config.index_source(layer)]
            main_keys = used(trace.main_rows[config.kv_source(layer)], MAIN, dtype)
        else:
            selected, main_keys = np.zeros((len(x), 0), np.int64), np.zeros((0, config.head_dim), dtype)
        sink = weights.plain(f"{prefix}.attn_sink")
        heads = attention.attend(q, pos, window_keys, pos, config.sliding_window, main_keys, selected, sink)
        return attention.output(config, weights, prefix, heads, pos, freqs)

    def select(
        self,
        trace: Trace,
        choices: Own,
        layer: int,
        x: np.ndarray,
        c_q: np.ndarray,
        pos: np.ndarray,
        freqs: np.ndarray,
    ) -> None:
        """Scores of one index source, its top-k and, at the candidate source, the candidate blocks for later layers."""
        config = self.config
        raw, head_weights = indexer.queries(config, self.weights, layer, x, c_q, pos, freqs)
        query = choices.index_query(raw)
        keys = used(trace.index_rows[config.kv_source(layer)], INDEX, self.weights.dtype)
        visible = (pos + 1) // config.compress_ratios[layer]
        pool = trace.candidates[config.candidate_source_layer_id] if config.uses_candidates(layer) else None
        scores = indexer.dense_scores(query, head_weights, keys)
        scores = indexer.mask_scores(scores, visible, pool, config.candidate_block_size)
        scoring = indexer.Scoring(raw, query, head_weights, keys, visible, scores)
        trace.index_scores[layer] = scores
        trace.topk[layer] = choices.topk(layer, pos, scoring)
        if layer == config.candidate_source_layer_id:
            trace.candidates[layer] = choices.candidates(layer, pos, scoring)

    def ffn(
        self, trace: Trace, choices: Own, layer: int, x: np.ndarray, pos: np.ndarray, is_image: np.ndarray
    ) -> np.ndarray:
        config, prefix = self.config, f"layers.{layer}.ffn"
        scores, trace.router[layer] = moe.router_scores(self.weights, prefix, x, is_image)
        ids = choices.experts(layer, pos, trace.router[layer], config.num_experts_per_tok)
        trace.experts[layer] = ids
        gates = moe.gate_weights(scores, ids, config.routed_scaling_factor)
        return moe.mixture(self.weights, prefix, x, ids, gates, config.swiglu_limit)
