"""V4.1-Flash, differentiable: the reference path in plain PyTorch, with its caches and weights quantised on request.

Reads whole sequences from position 0 instead of a cache. What inference stores is passed through the stored format
and back, with a straight-through gradient (`quantise`), so that the weights learn to live with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from orchestrator.model.config import ModelConfig
from orchestrator.model.rope import inverse_frequencies
from orchestrator.train import block
from orchestrator.train.attention import sparse_attention, window_mask
from orchestrator.train.compressed import Selector, global_rows
from orchestrator.train.engram import EngramHash, inject
from orchestrator.train.fused import fused
from orchestrator.train.lookup import lookup
from orchestrator.train.noise import noise
from orchestrator.train.parameters import entries, lr_scale, matrix_view, register, registered, start_value
from orchestrator.train.phases import Phase
from orchestrator.train.quantise import prepare
from orchestrator.train.streams import Streams

_INDEX_LOSS = 0.1  # its gradients reach the indexer alone; the factor matters for the clipping of gradients only
_BALANCE_LOSS = 1e-4


@dataclass
class Forward:
    """Results of a pass over [B, S] tokens."""

    hidden: torch.Tensor  # the head's input [B, S, d]
    taps: torch.Tensor | None  # [B, S, taps * d], what draft stages read
    index_loss: torch.Tensor
    balance_loss: torch.Tensor
    recalled: torch.Tensor  # attention mass on selected rows over that on all compressed rows, mean over layers


@fused
def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood in nats of logits [T, V]."""
    return F.cross_entropy(logits.float(), labels)


class TrainModel(nn.Module):
    """The text backbone. `dtype` is that of matrix products: bfloat16 on a GPU, float32 on a CPU by default."""

    load: torch.Tensor
    """float32 [layers, experts], tokens that each expert was chosen for since the last step."""
    plain: torch.Tensor
    yarn: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        engram: str | Path | Mapping[str, np.ndarray],
        seed: int = 0,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`engram`: the constants of the hash (`EngramTables.arrays`), or the file of a dataset that holds them."""
        super().__init__()
        self.config, self.seed, self._dtype = config, seed, dtype
        self.entries = {e.name: e for e in entries(config, drafter=False)}
        generator = torch.Generator().manual_seed(seed)
        register(self, {name: start_value(e, config, generator) for name, e in self.entries.items()})
        self.hash = EngramHash(config, dict(engram if isinstance(engram, Mapping) else np.load(engram)))
        rd = config.qk_rope_head_dim
        self.register_buffer("plain", inverse_frequencies(rd, config.rope_theta), persistent=False)
        yarn = inverse_frequencies(
            rd,
            config.compress_rope_theta,
            factor=config.rope_factor,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            original_max_position=config.original_max_position_embeddings,
        )
        self.register_buffer("yarn", yarn, persistent=False)
        self.register_buffer("load", torch.zeros(config.num_hidden_layers, config.n_routed_experts), persistent=False)

    # The trainer's view

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every stored value by its checkpoint name, routed experts stacked."""
        return registered(self)

    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """Tensors that Muon updates, as (count, rows, columns)."""
        views = {name: matrix_view(entry, self.config) for name, entry in self.entries.items()}
        return {name: view for name, view in views.items() if view is not None}

    def lr_scales(self) -> dict[str, float]:
        """Learning-rate factors of AdamW."""
        return {name: lr_scale(name) for name in self.entries}

    @property
    def dtype(self) -> torch.dtype:
        if self._dtype is not None:
            return self._dtype
        return torch.bfloat16 if self.load.is_cuda else torch.float32

    def loss(self, tokens: torch.Tensor, phase: Phase, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Next-token loss with the indexer's and the balance loss. tokens int64 [B, S + 1]; S divides by the window."""
        lower = self.replays(tokens[:, :-1]) if phase.replay else None
        out = self(tokens[:, :-1], phase, lower)
        head = self.get("head.weight").to(self.dtype)
        ce = cross_entropy(F.linear(out.hidden.flatten(0, 1), head), tokens[:, 1:].flatten())
        total = ce + _INDEX_LOSS * out.index_loss + _BALANCE_LOSS * out.balance_loss
        metrics = {"ce": ce, "index": out.index_loss, "balance": out.balance_loss, "recall": out.recalled}
        return total, {name: value.detach() for name, value in metrics.items()}

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        """Move each router bias against its expert's excess of tokens; slower towards the end."""
        speed = 1e-2 * (1 - progress) + 1e-4
        for layer in range(self.config.num_hidden_layers):
            load = self.load[layer]
            self.get(f"layers.{layer}.ffn.gate.bias").add_(torch.sign(load.mean() - load), alpha=speed)
        self.load.zero_()

    def get(self, name: str) -> torch.Tensor:
        """A stored value by its checkpoint name."""
        return getattr(self, name.replace(".", "/"))

    # The model

    def weights(self, *, quantised: bool) -> dict[str, torch.Tensor]:
        """Every tensor as a product takes it."""
        return prepare(self.entries, self.tensors(), self.dtype, quantised=quantised)

    def forward(
        self, tokens: torch.Tensor, phase: Phase, lower: torch.Tensor | None = None, *, taps: bool = False
    ) -> Forward:
        """tokens int64 [B, S]; `lower` int [B, S] bounds the decoder's windows from below."""
        config, dtype = self.config, self.dtype
        batch, length = tokens.shape
        device = tokens.device
        weights = self.weights(quantised=phase.quantised)
        streams = Streams(
            lookup(weights["embed.weight"], tokens.flatten()), config.hc_mult, config.rms_norm_eps,
            config.hc_eps, config.hc_sinkhorn_iters,
        )  # fmt: skip
        positions = torch.arange(length, device=device)
        ropes = {
            compressed: block.repeated(block.angles(frequencies, positions), batch)
            for compressed, frequencies in ((False, self.plain), (True, self.yarn))
        }
        near = window_mask(batch, length, config.sliding_window, None, device)
        near_decoder = near if lower is None else window_mask(batch, length, config.sliding_window, lower, device)
        mains: dict[int, torch.Tensor] = {}
        keys: dict[int, torch.Tensor] = {}
        selector = Selector(config, phase, batch)
        tapped: list[torch.Tensor] = []
        balances: list[torch.Tensor] = []

        for layer in range(config.num_hidden_layers):
            w = block.sub(weights, f"layers.{layer}.")
            if layer in config.engram_layer_ids:
                streams.x = inject(w, streams.x, self.hash.rows(layer, tokens).flatten(0, 1), config)
            if taps and layer in config.dspark_target_layer_ids:
                tapped.append(streams.x.mean(-2).to(dtype))
            ratio, source = config.ratio(layer), config.kv_source(layer)
            rope = ropes[ratio > 0]
            x = streams.enter(block.hyper(w, "attn"), w["attn_norm.weight"], dtype)
            c_q, q = block.query(w, x, rope, config)
            rows = F.linear(x, w["attn.wkv"])
            rows = block.cache_row(
                rows, w["attn.kv_norm.weight"], rope, config.rms_norm_eps, "window", quantised=phase.quantised
            )
            visible = (positions + 1).div(ratio, rounding_mode="floor") if ratio else torch.zeros_like(positions)
            visible = visible.to(torch.int32)
            if source is not None:
                if config.is_full(layer):
                    first = (rope[0][::ratio], rope[1][::ratio])  # sequences are multiples of the ratio
                    made = global_rows(w, x, first, config, quantised=phase.quantised)
                    mains[layer], keys[layer] = (t.unflatten(0, (batch, -1)) for t in made)
                if layer in config.index_source_layer_ids:
                    selector.select(layer, w, x, c_q, rope, keys[source], visible)
            heads, mass = sparse_attention(
                q.unflatten(0, (batch, -1)), rows.unflatten(0, (batch, -1)),
                None if source is None else mains[source], w["attn.attn_sink"],
                near_decoder if layer >= config.encoder_layers else near, visible,
                None if source is None else selector.chosen, config.sliding_window, config.head_dim**-0.5,
            )  # fmt: skip
            if source is not None:
                selector.used(mass)
            streams.leave(block.output(w, heads.flatten(0, 1), rope, config))

            x = streams.enter(block.hyper(w, "ffn"), w["ffn_norm.weight"], dtype)
            y, chosen, s = block.experts(w, x, config, config.num_experts_per_tok)
            balances.append(_balance(*(t.unflatten(0, (batch, -1)) for t in (chosen, s))))
            if self.training and torch.is_grad_enabled():
                with torch.no_grad():
                    self.load[layer] += chosen.sum(0)
            streams.leave(y)

        hidden = block.normed(streams.collapse(), weights["norm.weight"], config.rms_norm_eps).to(dtype)
        return Forward(
            hidden.unflatten(0, (batch, -1)),
            torch.cat(tapped, -1).unflatten(0, (batch, -1)) if taps else None,
            selector.loss(),
            torch.stack(balances).mean(),
            selector.recalled(device),
        )

    def replays(self, tokens: torch.Tensor) -> torch.Tensor:
        """int [B, S]: where each row's decoder window begins, as if prompts had ended `keep_tokens` later.

        A function of the tokens, so that it needs no state; none to eight beginnings a sequence, two on average.
        """
        length = tokens.shape[1]
        rate = noise(tokens, salt=1)[:, :1] * 4 / length
        starts = noise(tokens, salt=2) < rate
        return torch.where(starts, torch.arange(length, device=tokens.device), 0).cummax(-1).values


def _balance(chosen: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Sequence-wise balance: experts' share of tokens times their mean score, 1 when even."""
    share = chosen.mean(1) * (s.shape[-1] / chosen.sum(-1).mean())
    return (share * (s / s.sum(-1, keepdim=True)).mean(1)).sum(-1).mean()


__all__ = ["Forward", "TrainModel", "cross_entropy"]
