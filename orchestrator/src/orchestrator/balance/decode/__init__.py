"""Decode: which engine takes which request. No I/O, no clock."""

from orchestrator.balance.decode.placement import (
    DecodeEngine,
    Incoming,
    PowerOfTwo,
    RoundRobin,
    choose_group,
    fewest_requests,
    fewest_tokens,
    need,
    place,
    two_dimensional,
)

__all__ = [
    "DecodeEngine",
    "Incoming",
    "PowerOfTwo",
    "RoundRobin",
    "choose_group",
    "fewest_requests",
    "fewest_tokens",
    "need",
    "place",
    "two_dimensional",
]
