"""The decode role."""

from orchestrator.roles.decode.core import Decode
from orchestrator.roles.decode.row import DecodeOptions, Row

__all__ = ["Decode", "DecodeOptions", "Row"]
