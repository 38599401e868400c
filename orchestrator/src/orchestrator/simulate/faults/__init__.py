"""The menu of faults, and how a run's schedule is drawn from it."""

from orchestrator.simulate.faults.base import Fault, FaultKind
from orchestrator.simulate.faults.menu import MENU, find, schedule

__all__ = ["MENU", "Fault", "FaultKind", "find", "schedule"]
