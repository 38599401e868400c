"""States of an engine's requests on their way out: offered while they are made, kept until the targets have them."""

from __future__ import annotations

import secrets
from collections import Counter

from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.handoff.messages import Form
from orchestrator.engine.handoff.parts import HandoffRefused
from orchestrator.model.batch import StepBatch
from orchestrator.roles.engine_port import Begin, Export, Load
from orchestrator.roles.messages import Key
from orchestrator.service.ports.doors import Doors
from orchestrator.service.ports.shipment import Shipment
from orchestrator.service.ports.tickets import HANDOFF_BYTES, Ticket
from orchestrator.transfer import TransferFailed


def labels_of(c: Begin | Export | Load, ticket: Ticket) -> dict[str, str]:
    """What a state says that it is."""
    return {"request": c.request, "epoch": str(c.epoch), "ticket": ticket.handoff.hex()}


class Departures:
    """For the engine's thread, which never waits here.

    Attributes:
        ships: by request and epoch. counts: handoffs and bytes; failures by reason. seconds: of transfers.
    """

    def __init__(self, handoffs: Handoffs, doors: Doors) -> None:
        self._handoffs, self._doors = handoffs, doors
        self.ships: dict[Key, Shipment] = {}
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    def go_ahead(self, name: str, c: Begin, form: Form) -> bytes:
        """Offer what a request's steps make from now on; the ticket, empty where too many are offered."""
        try:
            return self._offer(name, c, form).ticket
        except TransferFailed as error:
            self.counts[f"not ahead: {error.reason}"] += 1  # it leaves at once when it is computed
            return b""

    def wrote(self, layer: int, batch: StepBatch) -> None:
        """In the midst of a step: rows of a layer can go while those above it are computed."""
        self._handoffs._wrote(layer, batch)
        if not batch.chunks:  # overlapped decoding, perhaps by another thread
            return
        for ship in self.ships.values():
            if ship.leaving is not None:
                ship.push(ship.leaving.take())

    def collect(self) -> None:
        """Behind a step."""
        for ship in self.ships.values():
            ship.collect()

    def close(self, name: str, c: Export, form: Form) -> Shipment:
        """Stop a request and offer all of it. Raises HandoffRefused and ValueError."""
        key = (c.request, c.epoch)
        ship = self.ships.get(key)
        if ship is not None and (ship.leaving is None or not ship.alive):  # nobody has fetched it within the lease
            self.withdraw(key)
            if ship.leaving is not None:
                if form != "full":
                    raise HandoffRefused("ended", f"what went ahead was given up: {ship.failed}")
                ship.leaving.cancel()
            ship = None
        ahead = ship is not None
        try:
            ship = ship or self._offer(name, c, form)
        except TransferFailed as error:
            raise HandoffRefused("room", str(error)) from None
        ship.finish(ahead=ahead)
        if not ship.alive:
            raise HandoffRefused("ended", f"the state could not be offered: {ship.failed}")
        self.counts["handoffs out"] += 1
        self.counts["bytes out"] += ship.size
        self.counts["bytes out ahead"] += ship.ahead
        self.counts["bytes out taken ahead"] += ship.taken_ahead
        return ship

    def withdraw(self, key: Key) -> None:
        """Free what is offered of a request; an unknown one is no error."""
        ship = self.ships.pop(key, None)
        if ship is None:
            return
        ship.cancel("withdrawn")
        outcome = ship.offered.outcome
        if outcome is not None and outcome.good:
            self.seconds += max(0.0, ship.offered.ended_at - ship.finished_at)
        elif outcome is not None:
            self.counts[f"not sent: {outcome.reason}"] += 1

    def clear(self, why: str) -> None:
        for ship in self.ships.values():
            ship.cancel(why)
        self.ships.clear()

    def _offer(self, name: str, c: Begin | Export, form: Form) -> Shipment:
        """Raises TransferFailed where too many are offered; ValueError, HandoffRefused as `Handoffs.begin`."""
        ticket = self._doors.ticket(secrets.token_bytes(HANDOFF_BYTES), c.epoch, form)
        offered = self._doors.sender.offer(ticket.handoff, c.epoch)
        try:
            leaving = self._handoffs.begin(name, form, labels_of(c, ticket))
        except BaseException:
            offered.cancel()
            raise
        ship = self.ships[c.request, c.epoch] = Shipment(leaving, offered, ticket, self._handoffs.kind)
        ship.push(leaving.take())
        return ship
