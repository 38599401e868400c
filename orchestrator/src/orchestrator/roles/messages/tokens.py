"""Output, from a decode worker to the entry."""

from __future__ import annotations

from orchestrator.roles.messages.base import Wire


class Tokens(Wire, frozen=True):
    """Decode worker to entry: output from `index` on; empty ones tell that it lives. Repeated until acknowledged.

    `reason` ends the request after these tokens: "stop" or "length". `cached`: prompt tokens that were not computed.
    `notes` stand beside the tokens, encoded, where there is more to tell of each, such as log-probabilities.
    """

    request: str
    epoch: int
    worker: str
    incarnation: int
    step: int
    plan: int
    index: int
    tokens: tuple[int, ...]
    reason: str = ""
    cached: int = 0
    notes: tuple[bytes, ...] = ()


class TokensAck(Wire, frozen=True):
    """Entry to decode worker: it has all output before `upto`. Renews the request's lease."""

    request: str
    epoch: int
    upto: int
