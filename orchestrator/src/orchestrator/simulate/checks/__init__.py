"""What must hold in every run: the ten invariants, and that the service recovers."""

from orchestrator.simulate.checks.violation import INVARIANTS, Violation

__all__ = ["INVARIANTS", "Violation"]
