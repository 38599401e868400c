"""Experts of a layer spread over ranks: what one rank holds, and how its tokens reach the others' experts.

Attention stays data-parallel: each rank has its own requests, and every layer's routed experts are one pool of all
ranks (docs/expert_parallel.md).
"""

from orchestrator.model.expert_parallel.attach import attach, attach_packed, detach, fill
from orchestrator.model.expert_parallel.drafts import DraftExperts, attach_drafts
from orchestrator.model.expert_parallel.gpu_layer import GpuExperts
from orchestrator.model.expert_parallel.held import HeldExperts
from orchestrator.model.expert_parallel.layer import ParallelExperts
from orchestrator.model.expert_parallel.packed_source import LoadedPacked, PackedSource
from orchestrator.model.expert_parallel.pool import ExpertPool, ExpertShapes, PackedPool
from orchestrator.model.expert_parallel.source import CheckpointExperts, ExpertSource, LoadedExperts

__all__ = [
    "CheckpointExperts",
    "DraftExperts",
    "ExpertPool",
    "ExpertShapes",
    "ExpertSource",
    "GpuExperts",
    "HeldExperts",
    "LoadedExperts",
    "LoadedPacked",
    "PackedPool",
    "PackedSource",
    "ParallelExperts",
    "attach",
    "attach_drafts",
    "attach_packed",
    "detach",
    "fill",
]
