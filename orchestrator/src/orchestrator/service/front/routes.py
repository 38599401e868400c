"""HTTP routes about the service's processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request

from orchestrator.server.auth import Keys
from orchestrator.server.errors import ApiError
from orchestrator.server.settings import ServerSettings


def add_cluster_routes(
    app: FastAPI, settings: ServerSettings, *, status: Callable[[], dict[str, Any]], drain: Callable[[str], str]
) -> None:
    """Add `GET /cluster/status` and `POST /cluster/drain?worker=NAME`, for holders of an API key.

    Args:
        status: what to show, as JSON can hold it.
        drain: has a worker leave; gives the name of who takes over. Raises KeyError and ValueError.
    """
    keys = Keys(settings.api_keys)

    @app.get("/cluster/status", summary="The processes of the service")
    def cluster_status(request: Request) -> dict[str, Any]:
        keys.caller(request.headers)
        return _within_time(status)

    @app.post("/cluster/drain", summary="Have a worker finish or move its requests and leave; another takes over")
    def cluster_drain(request: Request, worker: str = "") -> dict[str, Any]:
        keys.caller(request.headers)
        try:
            return {"worker": worker, "successor": _within_time(lambda: drain(worker))}
        except KeyError:
            raise ApiError(404, f"worker: got {worker[:80]!r}, allowed are names of /cluster/status") from None
        except ValueError as error:
            raise ApiError(409, str(error)) from None


def _within_time(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except TimeoutError:
        raise ApiError(503, "The supervisor does not answer; try again") from None
