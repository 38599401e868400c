"""Health that looks at progress: a server whose engine hangs is not healthy, however well it answers."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.responses import JSONResponse

from orchestrator.server.engine_protocol import AsyncEngineProtocol
from orchestrator.server.limits import Limits
from orchestrator.server.settings import ServerSettings


def add_health(app: FastAPI, engine: AsyncEngineProtocol, settings: ServerSettings, limits: Limits) -> None:
    """Add `/health` (does the engine move), `/health/ready` (may more work come) and `/health/live`."""

    def report() -> tuple[str, dict]:
        progress = engine.progress
        state = "failed" if progress.failed else "stalled" if progress.stalled(settings.stall_limit) else "ok"
        return state, {
            "status": state,
            "model": settings.model_name,
            "requests_in_flight": limits.in_flight,
            "engine": {
                "has_work": progress.has_work,
                "seconds_since_step": round(time.monotonic() - progress.last_step, 3),
                "steps": progress.steps,
                "running": progress.running,
                "waiting": progress.waiting,
                "failed": progress.failed,
            },
        }

    @app.get("/health", summary="200 while the engine makes progress or has nothing to do, else 503")
    async def health() -> JSONResponse:
        state, body = report()
        return JSONResponse(body, 200 if state == "ok" else 503)

    @app.get("/health/ready", summary="200 while another request would be taken, else 503")
    async def ready() -> JSONResponse:
        state, body = report()
        if state == "ok" and limits.in_flight >= limits.max_requests:
            state = "full"
        return JSONResponse({**body, "status": state}, 200 if state == "ok" else 503)

    @app.get("/health/live", summary="200 as long as the process answers")
    async def live() -> dict[str, str]:
        return {"status": "ok"}
