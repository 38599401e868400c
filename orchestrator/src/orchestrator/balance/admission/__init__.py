"""Admission: sizes, overload, rate limits, fairness between tenants. No I/O; the caller says what time it is."""

from orchestrator.balance.admission.door import Limits, Never, Overloaded, TokenBucket, check_load, check_size
from orchestrator.balance.admission.tenants import FairQueue, Weights

__all__ = [
    "FairQueue",
    "Limits",
    "Never",
    "Overloaded",
    "TokenBucket",
    "Weights",
    "check_load",
    "check_size",
]
