"""The times of the roles as the service's file sets them."""

from __future__ import annotations

from typing import Any

from orchestrator.roles.settings import Settings
from orchestrator.service.config import ServiceConfig


def role_settings(config: ServiceConfig) -> Settings:
    """Raises ValueError for a name that no role knows, or a value that is not allowed."""
    times: dict[str, Any] = config.times
    try:
        return Settings(**times)
    except TypeError as error:
        raise ValueError(f"times: {error}") from None
