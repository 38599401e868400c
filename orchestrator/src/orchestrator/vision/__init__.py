"""Images of requests: fetched or unpacked, checked against limits, decoded, fitted, and placed into the prompt.

Everything here runs before the engine and without PyTorch; what comes out is `model.vision.PreparedImage`.
"""

from orchestrator.vision.errors import ImageRefused
from orchestrator.vision.limits import ImageLimits
from orchestrator.vision.place import place
from orchestrator.vision.prompt import ImagePrompt
from orchestrator.vision.reader import ImageReader

__all__ = ["ImageLimits", "ImagePrompt", "ImageReader", "ImageRefused", "place"]
