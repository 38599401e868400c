"""The server process: the application on uvicorn."""

from __future__ import annotations

import os
import socket

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


def open_socket(settings: ServerSettings) -> socket.socket:
    """A listening socket on the host and port of the settings. Raises ValueError if that is not possible."""
    check_bind(settings)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host.strip("[]"), settings.port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ValueError(f"port: cannot listen on {settings.host}:{settings.port} ({reason}); give another") from None
