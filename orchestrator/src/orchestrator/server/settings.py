"""Settings of the HTTP server."""

from __future__ import annotations

import ipaddress

from pydantic import BaseModel, ConfigDict, Field, field_validator


class ServerSettings(BaseModel):
    """Limits and names. Every limit is finite: nothing waits for ever and no body is read without end.

    Attributes:
        model_name: what `/v1/models` lists and requests ask for; `aliases` are accepted as well.
        host, port: where to listen. Beyond loopback only with `api_keys`.
        api_keys: accepted keys (``Authorization: Bearer`` or ``x-api-key``); none means no check.
        max_context: tokens of prompt and output together.
        thinking: whether requests that do not say so reason before they answer.
        default_max_tokens: output limit of requests that set none; None takes the model's usual one.
        max_body_bytes, body_timeout: size and seconds that a request body may take.
        max_requests: requests in work or waiting; one more gets 429.
        ready_timeout: seconds until the first sign of the engine; then 503.
        keep_alive: seconds of silence after which a stream carries a comment.
        requests_per_minute, tokens_per_minute: for each key; 0 means no limit.
        stall_limit: seconds without a finished step, while there is work, that make `/health` fail.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_name: str = Field(default="v41-mini", min_length=1)
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_keys: tuple[str, ...] = Field(default=(), repr=False)
    max_context: int = Field(default=4096, ge=2)
    thinking: bool = True
    default_max_tokens: int | None = Field(default=None, ge=1)
    max_body_bytes: int = Field(default=8 * 2**20, ge=1)
    body_timeout: float = Field(default=30.0, gt=0)
    max_requests: int = Field(default=256, ge=1)
    ready_timeout: float = Field(default=300.0, gt=0)
    keep_alive: float = Field(default=15.0, gt=0)
    requests_per_minute: float = Field(default=0.0, ge=0)
    tokens_per_minute: float = Field(default=0.0, ge=0)
    stall_limit: float = Field(default=60.0, gt=0)

    @field_validator("api_keys")
    @classmethod
    def _keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if any(len(key) < 8 or not key.isascii() or any(c.isspace() for c in key) for key in keys):
            raise ValueError("an API key needs at least 8 characters, all of them ASCII and none of them a space")
        return keys

    @property
    def names(self) -> tuple[str, ...]:
        """All accepted model names, the listed one first."""
        return (self.model_name, *self.aliases)


def check_bind(settings: ServerSettings) -> None:
    """Raise ValueError if the server would be open to others without a key."""
    if not settings.api_keys and not is_loopback(settings.host):
        raise ValueError(
            f"host: got {settings.host!r} without an API key, which would let anybody in; "
            "allowed is a loopback address, or give a key with --api-key-file or FATHOM_API_KEYS"
        )


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address) can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
