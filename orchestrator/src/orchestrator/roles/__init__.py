"""The roles of the service as state machines without I/O.

`messages` tells how a core is driven, docs/request_states.md who holds what when.
"""

from orchestrator.roles.decode import Decode, DecodeOptions
from orchestrator.roles.encoder import Encoder, EncoderOptions
from orchestrator.roles.entry import Entry
from orchestrator.roles.prefill import Prefill, PrefillOptions
from orchestrator.roles.router import Router, RouterPolicy
from orchestrator.roles.rules import Rules
from orchestrator.roles.scaler import Scaler, ScalerOptions
from orchestrator.roles.settings import Settings

__all__ = [
    "Decode",
    "DecodeOptions",
    "Encoder",
    "EncoderOptions",
    "Entry",
    "Prefill",
    "PrefillOptions",
    "Router",
    "RouterPolicy",
    "Rules",
    "Scaler",
    "ScalerOptions",
    "Settings",
]
