"""From an image to the embeddings of its span."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch

from kernel_core.check import require
from orchestrator.model.vision.image import PreparedImage
from orchestrator.model.vision.span import span_rows
from orchestrator.model.vision.tower import VisionTower
from orchestrator.model.weights import ModelWeights

if TYPE_CHECKING:
    from orchestrator.model.checkpoint.vision_weights import VisionWeights


class VisionEncoder:
    """One tower on one device. Any thread may call it; images go through one after the other.

    Attributes:
        vision: its numbers.
        width: of an embedding.
    """

    def __init__(self, weights: ModelWeights | VisionWeights) -> None:
        """Raises ValueError for a model without image encoder."""
        vision, tensors = weights.config.vision, weights.vision
        start, newline, end = weights.image_start, weights.image_newline, weights.image_end
        if vision is None or tensors is None or start is None or newline is None or end is None:
            raise ValueError("weights: got a model without vision_config, allowed is one with an image encoder")
        self.vision, self.width = vision, weights.config.hidden_size
        self.tower = VisionTower(vision, tensors)
        self._frame = (start, newline, end)
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        if self.tower.device.type == "cuda":
            torch.cuda.current_stream(self.tower.device).synchronize()  # the tower's weights are there
            self._stream = torch.cuda.Stream(self.tower.device)

    def row_bytes(self, image: PreparedImage) -> int:
        """What the embeddings of an image take."""
        return image.geometry.tokens * self.width * torch.bfloat16.itemsize

    @torch.inference_mode()
    def encode(self, image: PreparedImage) -> torch.Tensor:
        """Embeddings of the span, bfloat16 [tokens, d] in host memory; of this image alone, whatever else is encoded.

        On a GPU the work runs on a stream of its own, beside the steps of an engine. Raises ValueError for an image
        that was prepared for another encoder.
        """
        size, patch, ratio = image.geometry, self.vision.patch_size, self.vision.downsample_ratio
        fits = size.width == size.columns * patch and size.grid_columns == -(-size.columns // ratio)
        require(fits, "image", f"patches of {size.width // size.columns} pixels", f"those of {patch} pixels")
        with self._lock, self._beside():
            pixels = torch.from_numpy(image.pixels).to(self.tower.device)
            rows = span_rows(self.tower(pixels, size), size, *self._frame)
            return rows.bfloat16().cpu()

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
