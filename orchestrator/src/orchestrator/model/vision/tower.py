"""The transformer over patches and the aligner to the text width, over PyTorch's attention and products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from orchestrator.model.config import VisionConfig
from orchestrator.model.vision.geometry import Geometry
from orchestrator.model.vision.rope import rotate, tables

NORM_EPS = 1e-6


class VisionTower:
    """Weights bound to the computation; holds no state. Images go through one at a time.

    On a CPU everything is float32, on a GPU products and attention are bfloat16 with float32 sums; norms, angles and
    activations are float32 on both.
    """

    def __init__(self, vision: VisionConfig, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights` are `vision.*` and `aligner.*` by name, all on one device."""
        self.vision = vision
        self.device = next(iter(weights.values())).device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        norms = {name for name in weights if "norm" in name}
        self._weights = {n: w.to(torch.float32 if n in norms else self.dtype) for n, w in weights.items()}

    @torch.inference_mode()
    def __call__(self, pixels: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """Features [grid_rows * grid_columns, d] of `pixels`, uint8 [height, width, 3] on the tower's device."""
        x = self._linear(patch_vectors(pixels, self.vision.patch_size).to(self.dtype), "vision.patch_embed.proj")
        head_dim = self.vision.hidden_size // self.vision.num_attention_heads
        cos, sin = (t.to(self.device) for t in tables(geometry.rows, geometry.columns, head_dim, self._theta))
        for block in range(self.vision.num_hidden_layers):
            prefix = f"vision.blocks.{block}"
            x = x + self._attention(self._norm(x, f"{prefix}.norm1"), f"{prefix}.attn", cos, sin)
            x = x + self._feed_forward(self._norm(x, f"{prefix}.norm2"), f"{prefix}.mlp")
        return self._align(self._norm(x, "vision.norm"), geometry)

    @property
    def _theta(self) -> float:
        return float(self.vision.rope_theta)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (wide * scale * self._weights[f"{name}.weight"]).to(self.dtype)

    def _attention(self, x: torch.Tensor, name: str, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Every patch sees every patch of its image."""
        heads = self.vision.num_attention_heads
        q, k, v = self._linear(x, f"{name}.wqkv").view(x.shape[0], 3, heads, -1).permute(1, 2, 0, 3)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)).squeeze(0)
        return self._linear(mixed.transpose(0, 1).flatten(1), f"{name}.wo")

    def _feed_forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self._linear(x, f"{name}.w1").chunk(2, dim=-1)
        return self._linear((F.silu(gate.float()) * up.float()).to(self.dtype), f"{name}.w2")

    def _align(self, x: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        hidden = self._linear(taps(x, geometry, self.vision.downsample_ratio), "aligner.w1")
        return self._linear(F.gelu(hidden.float()).to(self.dtype), "aligner.w2")


def patch_vectors(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """Patches of uint8 [height, width, 3] row by row, float32 [T, 3 * patch * patch]: channel, then line, then column.

    A byte becomes a number from -1 to 1 that bfloat16 can hold.
    """
    height, width, channels = pixels.shape
    values = (pixels.float().div_(255).sub_(0.5).div_(0.5)).bfloat16().float()
    parts = values.view(height // patch, patch, width // patch, patch, channels).permute(0, 2, 4, 1, 3)
    return parts.reshape(-1, channels * patch * patch)


def taps(x: torch.Tensor, geometry: Geometry, ratio: int) -> torch.Tensor:
    """`ratio` x `ratio` patches beside each other become one vector: x [T, c] -> [grid, c * ratio * ratio].

    By channel, then line, then column; zeros stand for patches beyond the right and the lower edge.
    """
    channels = x.shape[1]
    below, beside = geometry.grid_rows * ratio - geometry.rows, geometry.grid_columns * ratio - geometry.columns
    field = F.pad(x.view(geometry.rows, geometry.columns, channels), (0, 0, 0, beside, 0, below))
    field = field.view(geometry.grid_rows, ratio, geometry.grid_columns, ratio, channels).permute(0, 2, 4, 1, 3)
    return field.reshape(geometry.grid_rows * geometry.grid_columns, channels * ratio * ratio)
