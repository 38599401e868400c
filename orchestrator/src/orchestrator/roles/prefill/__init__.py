"""The prefill role."""

from orchestrator.roles.prefill.core import Prefill
from orchestrator.roles.prefill.job import Job, PrefillOptions

__all__ = ["Job", "Prefill", "PrefillOptions"]
