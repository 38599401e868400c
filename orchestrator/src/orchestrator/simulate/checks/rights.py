"""Who may work on what: no old epoch, no earlier life, nothing that was freed, nothing without its owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.roles import engine_port as port
from orchestrator.roles.messages import (
    AssignImage,
    AssignPrefill,
    Deliver,
    Release,
    Report,
    Reserve,
    Resume,
    Send,
    Submit,
    TokensAck,
)
from orchestrator.simulate.machine import Machine

_SLACK = 2.0
"""Seconds in which a worker may notice that a lease is over."""
_ENDED = 1 << 62
_WORK: dict[type, str] = {AssignPrefill: "jobs", Reserve: "rows", AssignImage: "", Submit: "records"}
"""Messages that give work, and where a core keeps it."""


class Rights:
    """Follows what each party may do, by that party's own clock."""

    def __init__(self, wrong: Callable[[int, str], None]) -> None:
        self._wrong = wrong
        self._heard: dict[str, dict[str, float]] = {}
        self._freed: dict[str, dict[str, tuple[int, float]]] = {}
        self._epochs: dict[str, int] = {}
        self._reports: dict[str, float] = {}

    def handled(self, machine: Machine, event: Any, actions: Sequence[Any]) -> None:
        """A machine has handled an event."""
        kind = type(event)
        if kind is TokensAck or kind is Resume or kind is port.Loaded:
            self._heard.setdefault(machine.name, {})[event.request] = machine.now
        elif kind is Release:
            freed = self._freed.setdefault(machine.name, {})
            epoch = _ENDED if event.ended else event.epoch
            freed[event.request] = max(epoch, freed.get(event.request, (0, 0.0))[0]), machine.now
        elif kind is Report:
            self._reports[event.worker] = machine.true_now
        elif kind in _WORK:
            self._given(machine, event, actions)

    def _given(self, machine: Machine, event: Any, actions: Sequence[Any]) -> None:
        """Work was given to a party; `Watch` has seen that it handled the message."""
        core, key = machine.core, (event.request, event.epoch)
        held = getattr(core, _WORK[type(event)], None)
        took = any(port.is_command(action) for action in actions)
        if not took and held is not None:
            took = key in held if type(event) is not Submit else _is(held.get(event.request), event)
        if not took:
            return
        life = getattr(core, "incarnation", 0)
        if getattr(event, "incarnation", life) != life and (held is None or _is_order(held.get(key), event)):
            self._wrong(7, f"{machine.name}, life {life}, takes {key} that was meant for life {event.incarnation}")
        epoch, at = self._freed.get(machine.name, {}).get(event.request, (0, 0.0))
        settings = getattr(core, "settings", None)
        if event.epoch <= epoch and settings is not None and machine.now - at < 0.9 * settings.tombstone:
            self._wrong(7, f"{machine.name} takes {key}, which it freed {machine.now - at:.1f} s ago")

    def sends(self, machine: Machine, action: Send) -> None:
        """An entry says which epoch counts from now on; the router gives work to workers of whom it has heard."""
        message = action.message
        if isinstance(message, (AssignPrefill, Reserve, AssignImage)):
            self._gives(machine, action.to)
            return
        if isinstance(message, Submit):
            self._epochs[message.request] = message.epoch
        elif isinstance(message, Resume):
            self._epochs[message.request] = message.new_epoch

    def _gives(self, machine: Machine, worker: str) -> None:
        settings = getattr(machine.core, "settings", None)
        heard = max(self._reports.get(worker, 0.0), machine.since)
        if settings is not None and machine.true_now - heard > 1.25 * (settings.lease + 2 * settings.beat) + _SLACK:
            silent = machine.true_now - heard
            self._wrong(7, f"{machine.name} gives work to {worker}, of which it has not heard for {silent:.1f} s")

    def delivers(self, machine: Machine, action: Deliver) -> None:
        """An entry gives tokens to a client."""
        present = self._epochs.get(action.request, action.epoch)
        if action.epoch < present:
            self._wrong(
                7, f"{machine.name} takes tokens of {action.request} from epoch {action.epoch}, {present} counts"
            )

    def runs(self, machine: Machine, command: port.RunDecode) -> None:
        """A machine starts a step."""
        heard, core = self._heard.get(machine.name, {}), machine.core
        settings = getattr(core, "settings", None)
        if settings is None:
            return
        for request, epoch in command.requests:
            since = machine.now - heard.get(request, machine.now)
            if since > settings.owner_lease + 2 * settings.beat + _SLACK:
                self._wrong(7, f"{machine.name} works on {request}, epoch {epoch}, {since:.1f} s without its owner")

    def forget(self, name: str) -> None:
        """A machine has begun anew, and may know nothing of its earlier lives."""
        self._heard.pop(name, None)
        self._freed.pop(name, None)


def _is(record: Any, event: Submit) -> bool:
    """Whether a router's record is what a `Submit` just asked for."""
    return record is not None and record.epoch == event.epoch


def _is_order(work: Any, event: Any) -> bool:
    """Whether a worker's job or row was made by this very message."""
    return work is not None and work.order is event
