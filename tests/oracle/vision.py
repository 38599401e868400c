"""The image encoder, slow and plain, in float64: canvas, resampling, patches, transformer, aligner, span.

Loops where the model's own code reshapes. See docs/vision.md.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from .weights import Weights, read_tensors


class VisionOracle:
    """The encoder of a checkpoint folder."""

    def __init__(self, folder: str | Path) -> None:
        self.numbers: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())["vision_config"]
        self.weights = Weights(read_tensors(folder))
        self.patch, self.ratio = self.numbers["patch_size"], self.numbers["downsample_ratio"]

    def canvas(self, width: float, height: float) -> tuple[int, int]:
        """Width and height in pixels of the canvas of an image."""
        return canvas(width, height, self.numbers)

    def span(self, pixels: np.ndarray) -> np.ndarray:
        """Embeddings [tokens, d] of a canvas uint8 [height, width, 3]."""
        features = self.features(pixels)
        rows, columns = features.shape[:2]
        out = [self.weights.plain("image_start")]
        for row in range(rows):
            out += [features[row, column] for column in range(columns)]
            out.append(self.weights.plain("image_newline"))
        return np.stack([*out, self.weights.plain("image_end")])

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """Aligned features [grid rows, grid columns, d]."""
        rows, columns = pixels.shape[0] // self.patch, pixels.shape[1] // self.patch
        x = np.stack([self._embed(pixels, row, column) for row in range(rows) for column in range(columns)])
        where = [(row, column) for row in range(rows) for column in range(columns)]
        for block in range(self.numbers["num_hidden_layers"]):
            name = f"vision.blocks.{block}"
            x = x + self._attention(self._norm(x, f"{name}.norm1"), f"{name}.attn", where)
            h = self._norm(x, f"{name}.norm2") @ self.weights.plain(f"{name}.mlp.w1.weight").T
            gate, up = h[:, : h.shape[1] // 2], h[:, h.shape[1] // 2 :]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weights.plain(f"{name}.mlp.w2.weight").T
        field = self._norm(x, "vision.norm").reshape(rows, columns, -1)
        grid = -(-rows // self.ratio), -(-columns // self.ratio)
        return np.stack([[self._align(field, row, column) for column in range(grid[1])] for row in range(grid[0])])

    def _embed(self, pixels: np.ndarray, row: int, column: int) -> np.ndarray:
        p = self.patch
        part = pixels[row * p : (row + 1) * p, column * p : (column + 1) * p].astype(np.float32)
        values = bfloat16((part / np.float32(255) - np.float32(0.5)) / np.float32(0.5)).astype(np.float64)
        vector = np.array([values[y, x, c] for c in range(3) for y in range(p) for x in range(p)])
        return self._linear(vector, "vision.patch_embed.proj")

    def _attention(self, x: np.ndarray, name: str, where: list[tuple[int, int]]) -> np.ndarray:
        width, heads = self.numbers["hidden_size"], self.numbers["num_attention_heads"]
        dim = width // heads
        joined = self._linear(x, f"{name}.wqkv")
        out = np.empty_like(x)
        for head in range(heads):
            q, k, v = (joined[:, part * width + head * dim : part * width + (head + 1) * dim] for part in range(3))
            q, k = self._turned(q, where), self._turned(k, where)
            scores = q @ k.T / math.sqrt(dim)
            scores = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head * dim : (head + 1) * dim] = scores / scores.sum(1, keepdims=True) @ v
        return self._linear(out, f"{name}.wo")

    def _turned(self, x: np.ndarray, where: list[tuple[int, int]]) -> np.ndarray:
        """Channel i turns against channel i + dim/2: half of these pairs by the row, the others by the column."""
        half, axis = x.shape[1] // 2, x.shape[1] // 4
        out = np.empty_like(x)
        for token, place in enumerate(where):
            for pair in range(half):
                step = np.float32(float(self.numbers["rope_theta"]) ** (-2 * (pair % axis) / half))
                angle = float(np.float32(place[pair // axis]) * step)
                a, b = x[token, pair], x[token, pair + half]
                out[token, pair] = a * math.cos(angle) - b * math.sin(angle)
                out[token, pair + half] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def _align(self, field: np.ndarray, row: int, column: int) -> np.ndarray:
        rows, columns, channels = field.shape
        vector = np.zeros(channels * self.ratio**2)
        for channel in range(channels):
            for dy in range(self.ratio):
                for dx in range(self.ratio):
                    y, x = row * self.ratio + dy, column * self.ratio + dx
                    if y < rows and x < columns:
                        vector[channel * self.ratio**2 + dy * self.ratio + dx] = field[y, x, channel]
        hidden = self._linear(vector, "aligner.w1")
        hidden = np.array([h * 0.5 * (1 + math.erf(h / math.sqrt(2))) for h in hidden])
        return self._linear(hidden, "aligner.w2")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights.plain(f"{name}.weight").T + self.weights.plain(f"{name}.bias")

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * self.weights.plain(f"{name}.weight")


def canvas(width: float, height: float, numbers: dict[str, Any]) -> tuple[int, int]:
    """Width and height in pixels of the canvas for an image of that size."""
    patch, most = numbers["patch_size"], numbers["max_image_tokens"]
    cell = patch * numbers["downsample_ratio"]
    if width * height < numbers["min_pixels"]:
        grow = math.sqrt(numbers["min_pixels"] / (width * height))
        width, height = int(width * grow), int(height * grow)
    best = math.ceil(width / patch) * patch, math.ceil(height / patch) * patch
    if tokens(*best, numbers) <= most:
        return best
    q = height / width
    across = math.sqrt((most - 2) / q + 0.25) - 0.5
    down = across * q
    if across < 1:
        return cell, (most - 2) // 2 * cell
    if down < 1:
        return (most - 3) * cell, cell
    shrink = min(math.floor(across) * cell / width, math.floor(down) * cell / height)
    return tuple(max(1, math.floor(side * shrink / patch)) * patch for side in (width, height))  # type: ignore[return-value]


def tokens(width: int, height: int, numbers: dict[str, Any]) -> int:
    """Length of the span of a canvas."""
    patch, ratio = numbers["patch_size"], numbers["downsample_ratio"]
    across, down = (math.ceil(side // patch / ratio) for side in (width, height))
    return down * (across + 1) + 2


def bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 (to nearest, ties to even), as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def resampled(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """uint8 [h, w, 3] scaled by a cubic kernel (a = -0.5) as wide as a source or a target pixel, whichever is wider.

    Lines first, rounded to bytes, then columns.
    """
    lines = _along(pixels.astype(np.float64), width)
    return _along(lines.transpose(1, 0, 2), height).transpose(1, 0, 2).astype(np.uint8)


def _along(values: np.ndarray, size: int) -> np.ndarray:
    count = values.shape[1]
    if size == count:
        return values
    step = count / size
    reach = 2 * max(1.0, step)
    out = np.empty((values.shape[0], size, values.shape[2]))
    for target in range(size):
        centre = (target + 0.5) * step
        first, last = max(0, int(centre - reach + 0.5)), min(count, int(centre + reach + 0.5))
        share = np.array([_cubic((source + 0.5 - centre) / max(1.0, step)) for source in range(first, last)])
        out[:, target] = np.tensordot(values[:, first:last], share / share.sum(), (1, 0))
    return np.clip(np.floor(out + 0.5), 0, 255)


def _cubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0
