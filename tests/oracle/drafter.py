"""The block drafter: context rows from taps, one bidirectional block, a head that runs token by token.

See docs/model.md, Draft stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import attention, mhc, moe
from .choices import Own, used
from .formats import WINDOW
from .forward import Oracle
from .trace import Trace


@dataclass(frozen=True)
class Context:
    """Stored rows of each stage's own window, made of the target's taps, at `positions` int64[T]."""

    positions: np.ndarray
    rows: list[np.ndarray]


@dataclass(frozen=True)
class Draft:
    """One drafted block. Entry k stands for the token at p + 2 + k when the anchor stands at p + 1."""

    base_logits: np.ndarray  # [block, V] before the Markov bias
    logits: np.ndarray  # [block, V]
    tokens: np.ndarray  # int64[block]: the given tokens, or the argmax
    confidence: np.ndarray  # [block], acceptance given that the prefix was accepted
    experts: list[np.ndarray]  # by stage, int64[block, k]


class Drafter:
    """Stages `mtp.{s}` on top of an oracle; embedding and head are the target's."""

    def __init__(self, oracle: Oracle, cache: str = "quantised"):
        self.oracle = oracle
        self.choices = Own(oracle.config, cache)
        self.stages = oracle.config.num_nextn_predict_layers

    def context(self, trace: Trace, choices: Own | None = None) -> Context:
        """Context rows of every position that the trace has taps for. The stage's attention norm is not applied.

        With `follow.Followed` as choices the rows window/{layers + stage} of its record are judged and taken.
        """
        config, weights = self.oracle.config, self.oracle.weights
        positions, freqs = trace.logits_positions, self.oracle.rope.plain
        main = trace.taps @ weights.matrix("mtp.0.main_proj").T
        main = mhc.rms_norm(main, weights.plain("mtp.0.main_norm.weight"), config.rms_norm_eps)
        rows = []
        for stage in range(self.stages):
            values = attention.window_values(config, weights, f"mtp.{stage}.attn", main, positions, freqs)
            layer = config.num_hidden_layers + stage
            rows.append((choices or self.choices).window_rows(layer, positions, values))
        return Context(positions, rows)

    def draft(self, context: Context, p: int, anchor: int, given: np.ndarray | None = None) -> Draft:
        """Drafts after the target has processed position p and sampled `anchor` for p + 1.

        `given` int[block] replaces the argmax as the drafted tokens, to judge a drafter that samples.
        """
        config, weights = self.oracle.config, self.oracle.weights
        block, n = config.dspark_block_size, config.hc_mult
        pos = p + 1 + np.arange(block)
        inputs = np.array([anchor] + [config.dspark_noise_token_id] * (block - 1))
        streams = np.repeat(weights.matrix("embed")[inputs][:, None], n, axis=1)
        pre: np.ndarray = np.zeros((block, n), weights.dtype)
        pre[:, 0] = 1
        chosen = []
        for stage in range(self.stages):
            prefix = f"mtp.{stage}"
            for half in ("attn", "ffn"):
                next_pre, post, comb = mhc.coefficients(config, weights, f"{prefix}.hc_{half}", streams)
                x = mhc.mix(streams, pre)
                x = mhc.rms_norm(x, weights.plain(f"{prefix}.{half}_norm.weight"), config.rms_norm_eps)
                if half == "attn":
                    y = self.attention(context, stage, x, pos, p)
                else:
                    scores, biased = moe.router_scores(weights, f"{prefix}.ffn", x, np.zeros(block, bool))
                    ids = moe.choose(biased, config.dspark_num_experts_per_tok)
                    gates = moe.gate_weights(scores, ids, config.routed_scaling_factor)
                    y = moe.mixture(weights, f"{prefix}.ffn", x, ids, gates, config.swiglu_limit)
                    chosen.append(ids)
                streams, pre = mhc.update(streams, y, post, comb), next_pre
        return self.sample(mhc.mix(streams, pre), anchor, given, chosen)

    def attention(self, context: Context, stage: int, x: np.ndarray, pos: np.ndarray, p: int) -> np.ndarray:
        """Every query of the block sees the window that ends at p and the whole block."""
        config, weights = self.oracle.config, self.oracle.weights
        prefix, freqs = f"mtp.{stage}.attn", self.oracle.rope.plain
        _, q = attention.query(config, weights, prefix, x, pos, freqs)
        own = self.choices.stored(WINDOW, attention.window_values(config, weights, prefix, x, pos, freqs))
        seen = (context.positions <= p) & (context.positions > p - config.sliding_window)
        keys = np.concatenate([used(rows, WINDOW, weights.dtype) for rows in (context.rows[stage][seen], own)])
        everywhere = np.full(len(keys), p)  # one common position: no causal or window cut between block and keys
        no_rows: np.ndarray = np.zeros((0, config.head_dim), weights.dtype)
        no_ids = np.zeros((len(x), 0), np.int64)
        sink = weights.plain(f"{prefix}.attn_sink")
        heads = attention.attend(q, np.full(len(x), p), keys, everywhere, config.sliding_window, no_rows, no_ids, sink)
        return attention.output(config, weights, prefix, heads, pos, freqs)

    def sample(self, x: np.ndarray, anchor: int, given: np.ndarray | None, chosen: list[np.ndarray]) -> Draft:
        """The head on the block's outputs x [block, d]; each position adds a bias of the token before it."""
        config, weights = self.oracle.config, self.oracle.weights
        last = f"mtp.{self.stages - 1}"
        normed = mhc.rms_norm(x, weights.plain(f"{last}.norm.weight"), config.rms_norm_eps)
        base = normed @ weights.matrix("head").T
        embed, head = (weights.matrix(f"{last}.markov_head.{part}") for part in ("embed", "head"))
        confidence_weight = weights.matrix(f"{last}.confidence_head.proj")[0]
        logits, tokens, confidence, previous = [], [], [], anchor
        for k in range(len(x)):
            logits.append(base[k] + head @ embed[previous])
            confidence.append(mhc.sigmoid(np.concatenate([x[k], embed[previous]]) @ confidence_weight))
            previous = int(logits[k].argmax() if given is None else given[k])
            tokens.append(previous)
        return Draft(base, np.array(logits), np.array(tokens), np.array(confidence), chosen)
