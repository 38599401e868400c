"""The server process: the application on uvicorn."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from orchestrator.server.settings import ServerSettings, check_bind


def make_server(app: FastAPI, settings: ServerSettings, *, log_level: str = "info") -> uvicorn.Server:
    """A uvicorn server that is ready to `run`. Raises ValueError if it would be open to others without a key."""
    check_bind(settings)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_level=log_level,
            ws="none",
            server_header=False,
            limit_concurrency=4 * settings.max_requests + 16,
            timeout_graceful_shutdown=30,
        )
    )
