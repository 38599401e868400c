"""Between a client and its entry. Nothing of it travels: the shell calls."""

from __future__ import annotations

from msgspec import Struct

from orchestrator.roles.messages.base import Outcome, RequestSpec


class ClientRequest(Struct, frozen=True, gc=False):
    """Event of an entry. A known id is a retry of the same request and changes nothing."""

    request: str
    spec: RequestSpec


class ClientCancel(Struct, frozen=True, gc=False):
    """Event of an entry: the client wants no more, or has gone."""

    request: str


class DeliverReady(Struct, frozen=True, gc=False):
    """Action of an entry, once and before any token: usage of the prompt."""

    request: str
    prompt_tokens: int
    cached_tokens: int


class Deliver(Struct, frozen=True, gc=False):
    """Action of an entry: output tokens, `index` of the first. Indices run without gap or repeat over all epochs.

    `notes` are those of the tokens, see `Tokens`; empty where there are none.
    """

    request: str
    epoch: int
    index: int
    tokens: tuple[int, ...]
    notes: tuple[bytes, ...] = ()


class DeliverEnd(Struct, frozen=True, gc=False):
    """Action of an entry: exactly once a request, last.

    `reason` is "stop" or "length" for finished ones, else words; `status` is that of HTTP. `retry_after`: seconds.
    """

    request: str
    outcome: Outcome
    reason: str
    tokens: int
    status: int = 200
    retry_after: int = 0
