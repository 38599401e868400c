"""The discrete choices of a forward pass behind one small interface: follow mode puts another's in their place."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import indexer, moe
from .config import Config
from .formats import INDEX, MAIN, WINDOW, Format


def used(rows: np.ndarray, form: Format, dtype: Any) -> np.ndarray:
    """Values of stored rows: uint8 rows are decoded, float rows stand for themselves."""
    return (form.decode(rows) if rows.dtype == np.uint8 else rows).astype(dtype)


class Own:
    """The oracle's own choices. Rows are stored as bytes ("quantised") or as they are ("float")."""

    def __init__(self, config: Config, cache: str):
        if cache not in ("float", "quantised"):
            raise ValueError(f"cache is {cache!r}, expected 'float' or 'quantised'")
        self.config = config
        self.quantised = cache == "quantised"

    def stored(self, form: Format, values: np.ndarray) -> np.ndarray:
        return form.encode(values) if self.quantised else values

    def window_rows(self, layer: int, positions: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self.stored(WINDOW, values)

    def main_rows(self, layer: int, groups: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self.stored(MAIN, values)

    def index_rows(self, layer: int, groups: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self.stored(INDEX, values)

    def index_query(self, q: np.ndarray) -> np.ndarray:
        """Queries take the round trip of the key format, but only where keys do."""
        return used(INDEX.encode(q), INDEX, q.dtype) if self.quantised else q

    def candidates(self, layer: int, positions: np.ndarray, scoring: indexer.Scoring) -> np.ndarray:
        blocks = indexer.block_scores(scoring.scores, scoring.visible, self.config.candidate_block_size)
        return indexer.best(blocks, self.config.candidate_topk_blocks)

    def topk(self, layer: int, positions: np.ndarray, scoring: indexer.Scoring) -> np.ndarray:
        return indexer.best(scoring.scores, self.config.index_topk)

    def experts(self, layer: int, positions: np.ndarray, biased: np.ndarray, k: int) -> np.ndarray:
        return moe.choose(biased, k)
