"""Counters of an engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """Counters since the start; times in seconds. On a GPU `model_seconds` is what starting the work takes.

    `prompt_tokens` were computed, some of them again; `cached_tokens` were taken from the prefix cache.
    `verifications` of a request's step with or without drafts; `drafts` of them were verified, `accepted` stood.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    verifications: int = 0
    drafts: int = 0
    accepted: int = 0
    preemptions: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    last_step: float = field(default_factory=time.monotonic)
