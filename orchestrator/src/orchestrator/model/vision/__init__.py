"""The image encoder: pixels to the rows that stand in for an image's tokens (docs/vision.md)."""

from orchestrator.model.vision.encoder import VisionEncoder
from orchestrator.model.vision.geometry import Geometry, fit
from orchestrator.model.vision.image import PreparedImage, prepare

__all__ = ["Geometry", "PreparedImage", "VisionEncoder", "fit", "prepare"]
