"""In which phase of its life a request is, and who has it then, as one who sees everything would say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.simulate.world import World

PHASES = ("received", "encoding", "queued", "prefilling", "transferring", "decoding", "migrating")


def phase_of(world: World, request: str) -> tuple[str, str] | None:
    """Phase and the machine that has the request in it; None where it has none of them (yet, or any more)."""
    stream = world.clients.open.get(request)
    if stream is None:
        return None
    decoding = _at_engines(world, "decode", request)
    if decoding is not None:
        name, seq = decoding
        return ("migrating" if seq.frozen else "decoding"), name
    prefilling = _at_engines(world, "prefill", request)
    if prefilling is not None:
        name, work = prefilling
        return ("prefilling" if work.small.length < len(work.tokens) else "transferring"), name
    for name, machine in world.machines.items():
        if world.role_of(name) == "prefill" and machine.core is not None and _offers(machine.core, request):
            return "transferring", name
    router = world.machines[world.settings.router]
    record = getattr(router.core, "records", {}).get(request)
    if record is None:
        return "received", stream.entry
    if record.state == "encoding":
        encoders = sorted(record.encoders.values())
        return "encoding", encoders[0] if encoders else router.name
    return ("queued", router.name) if record.state == "queued" else None


def _at_engines(world: World, role: str, request: str) -> tuple[str, Any] | None:
    """The worker whose engine has a request, and what that keeps of it."""
    for name, engine in world.engines.items():
        if world.role_of(name) == role:
            for key, work in getattr(engine, "live", {}).items():
                if key[0] == request:
                    return name, work
    return None


def _offers(core: object, request: str) -> bool:
    return any(key[0] == request for key in getattr(core, "jobs", {}))
