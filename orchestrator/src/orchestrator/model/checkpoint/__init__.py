"""Checkpoints: what tensors a configuration has, reading, checking and writing them.

`specs` derives names, dtypes and shapes; `safetensors_file` reads one file; `reader` a folder of them; `checks` holds
what a folder must satisfy; `assemble` makes `ModelWeights`; `encode` and `writer` go the other way.
"""

from orchestrator.model.checkpoint.assemble import load_weights
from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.model.checkpoint.reader import Checkpoint
from orchestrator.model.checkpoint.specs import parameter_count, stored_weights, tensor_specs
from orchestrator.model.checkpoint.verify import verify_checkpoint
from orchestrator.model.checkpoint.writer import write_checkpoint, write_config

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "load_weights",
    "parameter_count",
    "stored_weights",
    "tensor_specs",
    "verify_checkpoint",
    "write_checkpoint",
    "write_config",
]
