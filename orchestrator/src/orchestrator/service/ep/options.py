"""Settings of a group from those of the service."""

from __future__ import annotations

from orchestrator.cluster.options import PLANS, EpOptions
from orchestrator.engine.config import EngineConfig
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.service.config import EngineSettings
from orchestrator.service.process.build import settings_of


def ep_options(
    settings: EngineSettings, ranks: int, *, threads: int = 1, timeout: float = 30.0, plan: str = "off"
) -> EpOptions:
    """`plan`: name in `cluster.options.PLANS`, when experts are planned anew. `threads`: of each rank."""
    if plan not in PLANS:
        raise ValueError(f"plan: got {plan!r}, allowed are {', '.join(map(repr, PLANS))}")
    eplb, statistics = PLANS[plan]
    return EpOptions(
        ranks, eplb=eplb, statistics=statistics, timeout=timeout, engine=settings_of(settings), threads=threads
    )


def tokens_of(config: EngineConfig) -> int:
    """Tokens of cache of one rank."""
    return config.num_blocks * BLOCK_TOKENS
