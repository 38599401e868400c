"""Random checkpoints of any configuration.

Made so that every mechanism matters and nothing runs out of range: matrices keep the scale of their input, magnitudes
differ between rows and a few weights stick out (so that scale bytes differ and codes saturate), norms, sinks, gates,
biases and stream mixing are all away from their neutral values.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from orchestrator.model.checkpoint.encode import encode
from orchestrator.model.checkpoint.layout import Placement
from orchestrator.model.checkpoint.specs import Stored, stored_weights
from orchestrator.model.checkpoint.writer import write_checkpoint
from orchestrator.model.config import ModelConfig
from orchestrator.model.engram_tables import check_engram_rows, compressed_vocab_size

_ROW_SPREAD = 0.4  # standard deviation of the logarithm of a row's magnitude
_OUTLIER_EVERY = 512  # one weight in so many is drawn _OUTLIER times as large
_OUTLIER = 6.0

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def init_checkpoint(
    config: ModelConfig,
    path: str | Path,
    seed: int = 0,
    *,
    tokenizer: str | Path | None = None,
    placement: Placement = "single",
    overwrite: bool = False,
) -> ModelConfig:
    """Write a random checkpoint into the folder `path`; returns the configuration written.

    A weight depends on `seed` and its name only, not on placement. With a tokenizer (the path of a tokenizer.json; by
    default the one in the folder, if there is one) `engram_compressed_vocab_size` becomes that of its map.
    """
    check_engram_rows(config)
    beside = Path(path) / "tokenizer.json"
    if tokenizer is None and beside.is_file():
        tokenizer = beside
    if tokenizer is not None and config.engram_layer_ids:
        size = compressed_vocab_size(tokenizer, config.vocab_size)
        config = replace(config, engram_compressed_vocab_size=size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # drawing is serial, and on a busy machine thousands of small parallel steps only wait
    try:
        write_checkpoint(path, config, RandomWeights(config, seed), placement=placement, overwrite=overwrite)
    finally:
        torch.set_num_threads(threads)
    return config


class RandomWeights:
    """Stored tensors by name, made on demand. A callable for `write_checkpoint`."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config, self.seed = config, seed
        self._owner = {name: stored for stored in stored_weights(config) for name in stored.tensors()}
        self._recent: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def __call__(self, name: str) -> torch.Tensor:
        stored = self._owner[name]
        if self._recent[0] != stored.name:  # a weight and its scale come from one draw
            self._recent = (stored.name, encode(stored, initial_values(self.config, stored, self.seed)))
        return self._recent[1][name]


def initial_values(config: ModelConfig, stored: Stored, seed: int) -> torch.Tensor:
    """Real values of one weight, float32 of `stored.shape`. The same on every machine."""
    key = hashlib.sha256(f"{seed}/{stored.name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    draw = next(draw for pattern, draw in _rules(config) if re.search(pattern, stored.name))
    return torch.from_numpy(np.ascontiguousarray(draw(generator, stored.shape), dtype=np.float32))


def _rules(config: ModelConfig) -> list[tuple[str, Draw]]:
    """How to draw a weight, by name; the first match wins."""
    return [
        (r"norm\.weight$|norm[12]\.weight$", _normal(0.1, mean=1.0)),
        (r"engram\.[qk]_weight$", _normal(0.2, mean=1.0)),
        (r"^vision\..*bias$|^aligner\..*bias$", _normal(0.02)),
        (r"gate\.bias$", _normal(0.05)),  # enough to move a choice now and then
        (r"gate\.bias_vl$", _normal(0.2)),
        (r"attn_sink$", _normal(1.0)),
        (r"hc_\w+_base$", lambda generator, shape: _hc_base(config, generator)),
        (r"hc_\w+_scale$", lambda generator, shape: np.exp(0.2 * generator.standard_normal(shape)) * 0.3),
        (r"^embed\.weight$|^image_|\.engram\.embed$|markov_head\.embed", _normal(1.0)),
        (r"experts\.(\d+\.)?w[13]$", _expert_input),
        (r"experts\.(\d+\.)?w2$", lambda generator, shape: 0.5 * _matrix(generator, shape)),
        (r"", _matrix),
    ]


def _normal(deviation: float, mean: float = 0.0) -> Draw:
    def draw(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return mean + deviation * generator.standard_normal(shape, dtype=np.float32)

    return draw


def _matrix(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """`[o, i]`: outputs of about the magnitude of the inputs, with rows of different size and a few outliers."""
    rows, columns = shape
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(columns**-0.5)
    # Mean square 1, so that the product of spread and weights keeps the scale.
    values *= np.exp(_ROW_SPREAD * generator.standard_normal((rows, 1)) - _ROW_SPREAD**2).astype(np.float32)
    flat = values.reshape(-1)
    count = len(flat) // _OUTLIER_EVERY
    flat[generator.integers(0, len(flat), count)] *= np.float32(_OUTLIER)
    return values


def _expert_input(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """As `_matrix`, with one row in 32 six times as large: there `swiglu_limit` takes effect now and then."""
    values = _matrix(generator, shape)
    values[generator.integers(32) % shape[0] :: 32] *= np.float32(6.0)
    return values


def _hc_base(config: ModelConfig, generator: np.random.Generator) -> np.ndarray:
    """Coefficients before their squashing: mostly one stream in, all streams out, each stream mostly kept."""
    n = config.hc_mult
    base = np.zeros((2 + n) * n, dtype=np.float32)
    base[:n] = -2.0
    base[generator.integers(n)] = 2.0
    base[2 * n :] = np.where(np.eye(n, dtype=bool), 1.5, -1.5).reshape(-1)
    return base + 0.3 * generator.standard_normal(base.shape, dtype=np.float32)
