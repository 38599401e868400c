"""The times of the roles as the service's file sets them."""

from __future__ import annotations

from typing import Any

from orchestrator.roles.settings import Settings
from orchestrator.service.config import ServiceConfig

_ATTEMPTS = 16
"""That a request may fail in a row. Each process that dies ends one of all that wait for it, whoever is to blame."""


def role_settings(config: ServiceConfig) -> Settings:
    """Raises ValueError for a name that no role knows, or a value that is not allowed."""
    times: dict[str, Any] = {"attempts": _ATTEMPTS, **config.times}
    try:
        return Settings(**times)
    except TypeError as error:
        raise ValueError(f"times: {error}") from None
