"""What a forward pass leaves behind: every value an implementation can export, and the export itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

PerLayer = dict[int, np.ndarray]


@dataclass
class Trace:
    """Arrays by layer. `positions[l]` are the rows that layer l computed; other per-row arrays are in that order.

    Stored rows (`*_rows`) are uint8, or float where caches are not quantised; `*_values` are what they were made of.
    `main_rows` and `index_rows` hold all groups, `main_values` and `index_values` those from `first_group` on.
    """

    tokens: np.ndarray
    positions: PerLayer = field(default_factory=dict)
    streams: PerLayer = field(default_factory=dict)  # [T, n, d] entering the layer, after Engram
    window_values: PerLayer = field(default_factory=dict)
    window_rows: PerLayer = field(default_factory=dict)
    first_group: dict[int, int] = field(default_factory=dict)
    main_values: PerLayer = field(default_factory=dict)
    main_rows: PerLayer = field(default_factory=dict)
    index_values: PerLayer = field(default_factory=dict)
    index_rows: PerLayer = field(default_factory=dict)
    index_scores: PerLayer = field(default_factory=dict)  # [T, G], -inf where not allowed
    topk: PerLayer = field(default_factory=dict)
    candidates: PerLayer = field(default_factory=dict)
    router: PerLayer = field(default_factory=dict)  # biased scores [T, E]
    experts: PerLayer = field(default_factory=dict)
    final_streams: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [T, n, d] after the last layer
    taps: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [T, taps * d], the drafter's context input
    logits: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [T, V] at `logits_positions`
    logits_positions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def record(self) -> dict[str, np.ndarray]:
        """The export format that `Oracle.follow` reads."""
        floats = {np.dtype(np.float64): np.float32}
        out: dict[str, np.ndarray] = {"tokens": self.tokens}
        for name, per_layer in (("window", self.window_rows), ("main", self.main_rows), ("index", self.index_rows)):
            for layer, rows in per_layer.items():
                out[f"{name}/{layer}"] = rows.astype(floats.get(rows.dtype, rows.dtype))
        for name in ("topk", "candidates", "experts"):
            for layer, rows in getattr(self, name).items():
                out[f"{name}/{layer}"] = rows.astype(np.int32)
                out[f"{name}/{layer}/positions"] = self.positions[layer]
        for layer in self.window_rows:
            out[f"window/{layer}/positions"] = self.positions[layer]
        out["logits"] = self.logits.astype(np.float32)
        out["logits/positions"] = self.logits_positions
        return out


@dataclass(frozen=True)
class Replay:
    """A prefix hit of `hit` tokens: stored global rows by source layer, of which those before the hit are read."""

    hit: int
    main_rows: PerLayer
    index_rows: PerLayer

    @classmethod
    def of(cls, cold: Trace, hit: int) -> Replay:
        return cls(hit, cold.main_rows, cold.index_rows)
