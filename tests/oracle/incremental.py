"""The same model one token at a time, on rings and lists as a serving engine holds them: a check of the batch path.

It shares the row-wise pieces (projections, experts, stream mixing) with `forward` and has its own state, visibility,
selection and attention, written with gathers and loops in place of masks. See docs/model.md, State of a request and
Chunks and decode.
"""

from __future__ import annotations

import numpy as np

from . import attention, compressor, engram, indexer, mhc, moe
from .choices import Own, used
from .formats import INDEX, MAIN, WINDOW
from .forward import Oracle


class Ring:
    """Rows by position modulo the size; reading a position whose row was overwritten is an error."""

    def __init__(self, size: int):
        self.slots: list[tuple[int, object]] = [(-1, None)] * size

    def write(self, position: int, row: object) -> None:
        self.slots[position % len(self.slots)] = (position, row)

    def read(self, position: int):
        held, row = self.slots[position % len(self.slots)]
        if held != position:
            raise LookupError(f"position {position} was overwritten by {held}")
        return row


class Stepper:
    """Decodes tokens one by one; `rollback` drops the newest ones, as after a rejected draft."""

    def __init__(self, oracle: Oracle, cache: str, ring_rows: int | None = None, tail_rows: int | None = None):
        config = oracle.config
        backtracking = config.dspark_block_size + 1
        self.oracle = oracle
        self.choices = Own(config, cache)
        self.tokens: list[int] = []
        self.dead: list[bool] = []
        ring_rows = ring_rows or config.sliding_window + backtracking
        self.window = [Ring(ring_rows) for _ in range(config.num_hidden_layers)]
        self.tail = {s: Ring(tail_rows or 1 + backtracking) for s in config.kv_source_layer_ids}
        self.main: dict[int, list[np.ndarray]] = {s: [] for s in config.kv_source_layer_ids}
        self.selected: list[int] = []  # of the newest index source, within one step
        self.pool: set[int] = set()
        self.index: dict[int, list[np.ndarray]] = {s: [] for s in config.kv_source_layer_ids}

    def rollback(self, length: int) -> None:
        """Keeps the first `length` tokens. Rings stay as they are: rejected rows are overwritten later."""
        del self.tokens[length:], self.dead[length:]
        for source in self.main:
            rows = length // self.oracle.config.compress_ratios[source]
            del self.main[source][rows:], self.index[source][rows:]

    def step(self, token: int, image: bool = False) -> np.ndarray:
        """Appends one token and returns its logits [V]."""
        config, weights = self.oracle.config, self.oracle.weights
        self.tokens.append(int(token))
        self.dead.append(image)
        p = len(self.tokens) - 1
        streams = np.repeat(weights.matrix("embed")[token][None, None], config.hc_mult, axis=1)
        pre = np.eye(1, config.hc_mult)
        for layer in range(config.num_hidden_layers):
            if layer in config.engram_layer_ids:
                rows = self.oracle.hasher.rows(layer, np.array(self.tokens), np.array(self.dead))[-1:]
                streams = engram.inject(config, weights, layer, streams, rows)
            for half in ("attn", "ffn"):
                next_pre, post, comb = mhc.coefficients(config, weights, f"layers.{layer}.hc_{half}", streams)
                x = self.oracle.normed(layer, half, streams, pre)
                y = self.attention(layer, p, x) if half == "attn" else self.ffn(layer, x, image)
                streams, pre = mhc.update(streams, y, post, comb), next_pre
        x = mhc.rms_norm(mhc.mix(streams, pre), weights.plain("norm.weight"), config.rms_norm_eps)
        return (x @ weights.matrix("head").T)[0]

    def attention(self, layer: int, p: int, x: np.ndarray) -> np.ndarray:
        config, weights = self.oracle.config, self.oracle.weights
        prefix, ratio = f"layers.{layer}.attn", config.compress_ratios[layer]
        freqs, position = self.oracle.rope.of_layer(ratio), np.array([p])
        c_q, q = attention.query(config, weights, prefix, x, position, freqs)
        values = attention.window_values(config, weights, prefix, x, position, freqs)
        self.window[layer].write(p, self.choices.stored(WINDOW, values)[0])
        keys = [self.window[layer].read(i) for i in range(max(0, p - config.sliding_window + 1), p + 1)]
        keys = [used(row, WINDOW, np.float64) for row in keys]
        if layer in config.kv_source_layer_ids:
            self.write_global(layer, p, x, freqs)
        if layer in config.index_source_layer_ids:
            self.select(layer, p, x, c_q, freqs)
        if ratio:
            source = config.kv_source(layer)
            keys += [used(self.main[source][j], MAIN, np.float64) for j in self.selected]
        sink = weights.plain(f"{prefix}.attn_sink")
        heads = np.zeros_like(q)
        for h in range(config.num_attention_heads):
            exponent = [np.exp(q[0, h] @ k / np.sqrt(config.head_dim)) for k in keys]
            total = sum(exponent) + np.exp(sink[h])
            heads[0, h] = sum(e / total * k for e, k in zip(exponent, keys, strict=True))
        return attention.output(config, weights, prefix, heads, position, freqs)

    def write_global(self, layer: int, p: int, x: np.ndarray, freqs: np.ndarray) -> None:
        config, weights = self.oracle.config, self.oracle.weights
        ratio = config.compress_ratios[layer]
        kv, gate = compressor.project(config, weights, layer, x)
        self.tail[layer].write(p, (kv[0], gate[0]))
        if (p + 1) % ratio:
            return
        members = [self.tail[layer].read(i) for i in range(p + 1 - ratio, p + 1)]
        kv, gate = (np.stack(part)[None] for part in zip(*members, strict=True))
        group = np.array([p // ratio])
        main, index = compressor.rows_of_groups(config, weights, layer, kv, gate, group, freqs)
        self.main[layer].append(self.choices.stored(MAIN, main)[0])
        self.index[layer].append(self.choices.stored(INDEX, index)[0])

    def select(self, layer: int, p: int, x: np.ndarray, c_q: np.ndarray, freqs: np.ndarray) -> None:
        config = self.oracle.config
        raw, head_weights = indexer.queries(config, self.oracle.weights, layer, x, c_q, np.array([p]), freqs)
        q = self.choices.index_query(raw)[0]
        scored = []
        for j, row in enumerate(self.index[config.kv_source(layer)]):
            dots = q @ used(row, INDEX, np.float64)
            scored.append((-sum(w * max(dot, 0.0) for w, dot in zip(head_weights[0], dots, strict=True)), j))
        block = config.candidate_block_size
        if config.uses_candidates(layer):
            scored = [(s, j) for s, j in scored if j // block in self.pool]
        self.selected = sorted(j for _, j in sorted(scored)[: config.index_topk])
        if layer == config.candidate_source_layer_id:
            blocks: dict[int, float] = {}
            for s, j in scored:
                blocks[j // block] = min(s, blocks.get(j // block, np.inf))
            blocks[scored[-1][1] // block] = -np.inf  # the newest visible row's block is always kept
            ranked = sorted((s, b) for b, s in blocks.items())
            self.pool = {b for _, b in ranked[: config.candidate_topk_blocks]}

    def ffn(self, layer: int, x: np.ndarray, image: bool) -> np.ndarray:
        config, weights, prefix = self.oracle.config, self.oracle.weights, f"layers.{layer}.ffn"
        scores, biased = moe.router_scores(weights, prefix, x, np.array([image]))
        ranked = sorted(range(config.n_routed_experts), key=lambda e: (-biased[0, e], e))
        ids = np.array([ranked[: config.num_experts_per_tok]])
        gates = moe.gate_weights(scores, ids, config.routed_scaling_factor)
        return moe.mixture(weights, prefix, x, ids, gates, config.swiglu_limit)
