"""What layers with compressed rows add: main rows and index keys, the selection, and what its indexer learns from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from orchestrator.model.config import ModelConfig
from orchestrator.train import block
from orchestrator.train.fused import fused
from orchestrator.train.indexer import candidate_rows, index_loss, index_scores, select, visible_rows
from orchestrator.train.phases import Phase


@fused
def _pool(latent: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Pairs of tokens become one row, weighted channel by channel: [T, D] -> [T/2, D]."""
    pairs, gates = (t.float().unflatten(0, (-1, 2)) for t in (latent, gate))
    return (pairs * torch.softmax(gates, 1)).sum(1).to(latent.dtype)


def global_rows(
    w: block.Weights, x: torch.Tensor, rope: block.Angles, config: ModelConfig, *, quantised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Main rows [T/r, D] and index keys [T/r, Di] of a Full layer; `rope` at each group's first token."""
    eps = config.rms_norm_eps
    latent = F.linear(x, w["attn.compressor.wkv.weight"])
    if "attn.compressor.wgate.weight" in w:
        latent = _pool(latent, F.linear(x, w["attn.compressor.wgate.weight"]))
    latent = block.normed(latent, w["attn.compressor.norm.weight"], eps)
    main = block.cache_row(latent, None, rope, eps, "main", quantised=quantised)
    key = F.linear(latent.detach(), w["attn.indexer.wk.weight"])
    return main, block.cache_row(key, w["attn.indexer.k_norm.weight"], rope, eps, "index", quantised=quantised)


@dataclass
class _Lesson:
    """A selection's scores and the mass of the layers that have used it so far."""

    scores: torch.Tensor
    allowed: torch.Tensor
    mass: torch.Tensor | None = None


@dataclass
class Selector:
    """The selection in force from layer to layer, and the losses of the indexers that made them."""

    config: ModelConfig
    phase: Phase
    batch: int
    chosen: torch.Tensor | None = None
    """bool [B, S, G], rows that attention reads; None reads every visible row."""
    _candidates: torch.Tensor | None = None
    _lesson: _Lesson | None = None
    _losses: list[torch.Tensor] = field(default_factory=list)
    _recalled: list[torch.Tensor] = field(default_factory=list)

    def select(
        self, layer: int, w: block.Weights, x: torch.Tensor, c_q: torch.Tensor, rope: block.Angles,
        keys: torch.Tensor, visible: torch.Tensor,
    ) -> None:  # fmt: skip
        """Select anew (Full and Reindex layers) among index keys [B, G, Di]."""
        self._finish()
        config = self.config
        scores = self._scores(w, x, c_q, rope, keys)
        allowed = visible_rows(visible, keys.shape[1])
        if config.uses_candidates(layer) and self._candidates is not None:
            allowed = self._candidates
        if self.phase.sparse:
            with torch.no_grad():
                self.chosen = select(scores, allowed, config.index_topk)
                if layer == config.candidate_source_layer_id:
                    size, keep = config.candidate_block_size, config.candidate_topk_blocks
                    self._candidates = candidate_rows(scores, visible, size, keep)
        self._lesson = _Lesson(scores, allowed)

    def used(self, mass: torch.Tensor) -> None:
        """A layer has read by the selection and would have put `mass` [B, S, G] on the visible rows."""
        assert self._lesson is not None
        self._lesson.mass = mass if self._lesson.mass is None else self._lesson.mass + mass
        if self.chosen is not None:
            first = mass[0].float()  # one sequence is enough for a metric
            self._recalled.append(torch.where(self.chosen[0], first, 0.0).sum() / first.sum())

    def loss(self) -> torch.Tensor:
        """Mean over indexers, once all layers are through."""
        self._finish()
        return torch.stack(self._losses).mean()

    def recalled(self, device: torch.device) -> torch.Tensor:
        """Share of the attention mass on compressed rows that the selections hold; 0 where all rows are read."""
        return torch.stack(self._recalled).mean() if self._recalled else torch.zeros((), device=device)

    def _finish(self) -> None:
        lesson = self._lesson
        if lesson is not None and lesson.mass is not None:
            self._losses.append(index_loss(lesson.scores, lesson.allowed, lesson.mass))
        self._lesson = None

    def _scores(
        self, w: block.Weights, x: torch.Tensor, c_q: torch.Tensor, rope: block.Angles, keys: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        heads, dim = config.index_n_heads, config.index_head_dim
        q = F.linear(c_q.detach(), w["attn.indexer.wq_b"]).unflatten(-1, (heads, dim))
        q = block.stored(block.rotate_heads(q, *rope).float(), "index", q.dtype, quantised=self.phase.quantised)
        weights = F.linear(x.detach(), w["attn.indexer.weights_proj.weight"]).float() * (heads * dim) ** -0.5
        return index_scores(q.unflatten(0, (self.batch, -1)), keys, weights.unflatten(0, (self.batch, -1)))
