"""The router: who waits, who works on what, who is alive. All of it can be lost and comes back with reports."""

from orchestrator.roles.router.core import Router
from orchestrator.roles.router.policy import RouterPolicy

__all__ = ["Router", "RouterPolicy"]
