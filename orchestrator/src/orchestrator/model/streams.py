"""The residual streams: hyper-connections around every half-layer, with the update of one fused into the next."""

from __future__ import annotations

import torch

import mhc_engram
from orchestrator.model.config import ModelConfig
from orchestrator.model.weights import HyperConnection


class Streams:
    """X float32 [T, n, hidden] and what a half-layer leaves behind for the next.

    A half-layer's output is not added at once: it waits, so that the next half's kernel can update the streams, take
    its coefficients and mix its input in one pass over them.
    """

    def __init__(self, config: ModelConfig, embedded: torch.Tensor) -> None:
        count, device = embedded.shape[0], embedded.device
        self._config = config
        self._x = embedded.unsqueeze(1).repeat(1, config.hc_mult, 1)
        self._pre = torch.zeros(count, config.hc_mult, device=device)
        self._pre[:, 0].fill_(1.0)
        self._post = torch.empty(count, config.hc_mult, device=device)
        self._comb = torch.empty(count, config.hc_mult, config.hc_mult, device=device)
        self._pending: torch.Tensor | None = None

    def enter(self, hyper: HyperConnection, norm: torch.Tensor) -> torch.Tensor:
        """Input of the next half-layer, float32 [T, hidden]: mixed with the previous half's `pre`, then normed."""
        config = self._config
        coefficients = (self._pre, self._post, self._comb)  # the kernel reads the old ones before it writes
        x, *_ = mhc_engram.hc_step(
            self._x,
            self._pending,
            self._post,
            self._comb,
            hyper.fn,
            hyper.base,
            hyper.scale,
            self._pre,
            norm,
            eps=config.rms_norm_eps,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            iters=config.hc_sinkhorn_iters,
            coefficients=coefficients,
        )
        self._pending = None
        return x

    def leave(self, y: torch.Tensor) -> None:
        """Hand in the half-layer's output, float32 [T, hidden]."""
        self._pending = y

    def settle(self) -> torch.Tensor:
        """Apply what waits and return X, for readers between layers (Engram, taps, the head)."""
        if self._pending is not None:
            mhc_engram.hc_update(self._x, self._pending, self._post, self._comb)
            self._pending = None
        return self._x

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows only (int64 [T'])."""
        self._x = self._x.index_select(0, rows)
        self._pre = self._pre.index_select(0, rows)
        if self._pending is not None:
            self._pending = self._pending.index_select(0, rows)
        self._post = self._post.index_select(0, rows)
        self._comb = self._comb.index_select(0, rows)

    def collapse(self, norm: torch.Tensor | None) -> torch.Tensor:
        """The head's input, float32 [T, hidden]: mixed with the last `pre`, then normed unless `norm` is None."""
        return mhc_engram.hc_mix(self.settle(), self._pre, norm, self._config.rms_norm_eps)
