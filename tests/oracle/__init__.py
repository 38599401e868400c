"""A slow float64 model of the text forward pass, written from the description alone: the judge of implementations."""

from .config import Config, config_from_dict, read_config
from .forward import Oracle
from .trace import Replay, Trace
from .weights import Stored, read_tensors

__all__ = ["Config", "Oracle", "Replay", "Stored", "Trace", "config_from_dict", "read_config", "read_tensors"]
