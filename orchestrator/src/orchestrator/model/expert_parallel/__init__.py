"""Experts of a layer spread over ranks: what one rank holds, and how its tokens reach the others' experts.

Attention stays data-parallel: each rank has its own requests, and every layer's routed experts are one pool of all
ranks (docs/expert_parallel.md).
"""

from orchestrator.model.expert_parallel.attach import attach, detach, fill
from orchestrator.model.expert_parallel.held import HeldExperts
from orchestrator.model.expert_parallel.layer import ParallelExperts
from orchestrator.model.expert_parallel.pool import ExpertPool
from orchestrator.model.expert_parallel.source import CheckpointExperts, ExpertSource, LoadedExperts

__all__ = [
    "CheckpointExperts",
    "ExpertPool",
    "ExpertSource",
    "HeldExperts",
    "LoadedExperts",
    "ParallelExperts",
    "attach",
    "detach",
    "fill",
]
