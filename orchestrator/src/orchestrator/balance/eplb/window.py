"""Counts of the last steps, by layer and logical expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernel_core.check import require


class LoadWindow:
    """A ring of steps on one rank.

    Layers of a step are noted one by one, at dispatch, then `end_step` closes it. A step with a layer missing or with
    counts in the wrong layer is refused and leaves the ring as it was.
    """

    def __init__(self, layers: int, num_experts: int, length: int) -> None:
        require(
            min(layers, num_experts, length) > 0, "layers, num_experts, length", (layers, num_experts, length), "1 up"
        )
        self._ring = np.zeros((length, layers, num_experts), np.float32)
        self._steps = np.full(length, -1, np.int64)
        self._open = np.zeros((layers, num_experts), np.int64)
        self._noted = np.zeros(layers, np.bool_)
        self._ended = 0

    def note(self, layer: int, ids: np.ndarray, valid: np.ndarray) -> None:
        """Count a layer's routing of the running step; several calls of one layer are refused.

        Args:
            ids: integer [tokens, top_k], logical experts.
            valid: bool [tokens]; False for padding and dummy rows, whose ids may be anything.
        """
        layers, experts = self._open.shape
        require(0 <= layer < layers, "layer", layer, f"0 to {layers - 1}")
        require(not self._noted[layer], "layer", layer, "each once a step")
        require(
            ids.ndim == 2 and np.issubdtype(ids.dtype, np.integer), "ids", f"{ids.dtype} {list(ids.shape)}", "[T, k]"
        )
        fits = valid.dtype == np.bool_ and valid.shape == ids.shape[:1]
        require(fits, "valid", f"{valid.dtype} {list(valid.shape)}", f"bool [{len(ids)}]")
        kept = ids[valid].ravel()
        inside = kept.size == 0 or (int(kept.min()) >= 0 and int(kept.max()) < experts)
        require(inside, "ids", "ids out of range", f"0 to {experts - 1}")
        self._open[layer] = np.bincount(kept, minlength=experts)
        self._noted[layer] = True

    def end_step(self, step: int, tokens: int | np.ndarray, top_k: int) -> None:
        """Close the running step, whose number rises from call to call.

        Args:
            tokens: rows of this rank without padding; int64 [layers] where layers compute different rows, as in a
                prefill of which the decoder sees the end; 0 for an idle rank, which notes nothing or empty layers.

        Raises:
            ValueError: a layer does not sum to tokens x top_k, or `step` is not above the last; the running step's
                counts are dropped.
        """
        counts, noted = self._open.copy(), self._noted.copy()
        self._open[:], self._noted[:] = 0, False
        rows = np.broadcast_to(np.asarray(tokens, np.int64), noted.shape)
        wrong = np.flatnonzero((counts.sum(1) != rows * top_k) | (~noted & (rows > 0)))
        some = wrong[:4].tolist()
        given = tokens if isinstance(tokens, int) else rows[some].tolist()
        found = f"{given}, but layers {some} sum to {counts[some].sum(1).tolist()}"
        require(not some, "tokens", found, "tokens x top_k")
        last = int(self._steps.max())
        require(step > last, "step", step, f"above {last}")
        at = self._ended % len(self._ring)
        self._ring[at], self._steps[at] = counts, step
        self._ended += 1

    @property
    def steps(self) -> np.ndarray:
        """Numbers of the steps in the ring, oldest first, int64."""
        return self._steps[self._order()]

    def counts(self) -> np.ndarray:
        """float32 [steps, layers, experts], oldest step first."""
        return self._ring[self._order()]

    def _order(self) -> np.ndarray:
        length = len(self._ring)
        held = min(self._ended, length)
        return (self._ended - held + np.arange(held)) % length


def merge(windows: Sequence[LoadWindow]) -> np.ndarray:
    """Sum over ranks of the steps that all of them have, float32 [steps, layers, experts], oldest first.

    A rank that joined late or dropped a step takes that step out of the sum: half a step would look like a quiet one.
    """
    require(len(windows) > 0, "windows", "none", "one a rank")
    shapes = {w.counts().shape[1:] for w in windows}
    require(len(shapes) == 1, "windows", sorted(shapes), "the same layers and experts")
    common = windows[0].steps
    for window in windows[1:]:
        common = np.intersect1d(common, window.steps)
    total = np.zeros((len(common), *shapes.pop()), np.float32)
    for window in windows:
        total += window.counts()[np.isin(window.steps, common)]
    return total
