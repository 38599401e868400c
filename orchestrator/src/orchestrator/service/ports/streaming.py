"""The engine's side of a prefill or decode role whose states travel beside the roles' messages, by tickets.

A source offers parts as its engine makes them, while a prompt is computed too; a target fetches them into its memory
and hands them to its engine at `Load`. The engine's thread waits for nobody: `Load` is answered later, by `answers`.
docs/service.md, docs/handoff.md, docs/transfer.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kernel_core.check import require
from orchestrator.engine.engine import Engine
from orchestrator.engine.handoff.messages import Form
from orchestrator.engine.request import Event
from orchestrator.roles.engine_port import (
    Begin,
    Drop,
    Dropped,
    EngineEvent,
    Expect,
    Export,
    Exported,
    Load,
    Loaded,
    Reform,
    Reformed,
    Rename,
    Thaw,
    Withdraw,
)
from orchestrator.roles.handoff_port import HandoffPort
from orchestrator.roles.messages import Key
from orchestrator.roles.state_parts import KINDS, Kind
from orchestrator.service.config import TransferSettings
from orchestrator.service.ports.arrivals import Arrivals, NotLoaded
from orchestrator.service.ports.departures import Departures
from orchestrator.service.ports.doors import Doors
from orchestrator.service.ports.embeddings import adopt_embeddings
from orchestrator.service.spec import Carried
from orchestrator.transfer import Limits, Times

_PART = 512 << 20  # bytes; embeddings of one image are one part
_REST = 64 << 20  # bytes of a state beside rows, windows and embeddings
PATIENCE = 15.0
"""Seconds that a load may take in all: below `Settings.answer`, after which the whole group would count as dead."""


class StreamingPort(HandoffPort):
    """`EnginePort` of a prefill or a decode core over one engine. All but `numbers` belongs to one thread, which calls
    `answers` regularly, also without a command.

    Args:
        host: at which states are offered over TCP. node: shared memory is used between workers of one.
        folder: of the service on this machine; not needed by any link so far.
        room, replay_tail: as `HandoffPort`. times: of transfers. patience: seconds that a load may take.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        host: str,
        node: str,
        settings: TransferSettings,
        folder: Path | None = None,
        room: int = 0,
        replay_tail: bool = False,
        times: Times | None = None,
        patience: float = PATIENCE,
    ) -> None:
        require(patience > 0, "patience", patience, "above 0")
        super().__init__(engine, room=room, replay_tail=replay_tail)
        self._times, self._overlap = times or Times(), settings.overlap
        largest = _largest_state(engine)
        limits = Limits(part=min(_PART, largest), total=largest, held=largest)
        self.doors = Doors(settings.kind, host, node, limits, self._times)
        self.departures = Departures(self.handoffs, self.doors)
        self.arrivals = Arrivals(engine, self.handoffs, self.doors, limits, self._times, patience)
        self._taken: dict[str, bytes] = {}  # handoff of what was loaded, by name in the engine
        if engine.cache.wrote is not None:
            engine.cache.wrote = self.departures.wrote

    def answers(self) -> list[EngineEvent]:
        for key in list(self.arrivals.loads):
            loaded = self._arrived(key)
            if loaded is not None:
                self._answers.append(loaded)
        return super().answers()

    def numbers(self) -> dict[str, float]:
        """From any thread: bytes and handoffs, those that went before their prompt was computed, failures by reason."""
        counts = self.departures.counts.copy() + self.arrivals.counts.copy()
        return {name: float(count) for name, count in counts.items()} | {
            "seconds out": self.departures.seconds,
            "seconds in": self.arrivals.seconds,
            "bytes offered now": float(self.doors.sender.held),
        }

    def close(self) -> None:
        """Free all that is offered or fetched; other workers are told where that is possible."""
        self.departures.clear("the worker was closed")
        self.arrivals.clear()
        self.doors.close()
        self.arrivals.join(2 * self._times.silence)

    # Out

    def _add(self, name: str, c: Begin, carried: Carried, leaves_at: int) -> None:
        spans = adopt_embeddings(self.engine, c.spec.prompt, carried, dict(c.embeddings))
        try:
            self.engine.add(
                name,
                list(c.spec.prompt),
                carried.params,
                generated=c.output,
                seed=c.spec.seed,
                leaves_at=leaves_at,
                encoded=spans,
            )
        except BaseException:
            self.engine.release(spans, carried.params)
            raise

    def _ahead(self, name: str, c: Begin) -> bytes:
        sequence = self.engine.find(name)
        if not self._overlap or sequence is None:
            return b""
        return self.departures.go_ahead(name, c, "replay" if sequence.leaves_at == 0 else "full")

    def _note(self, events: Iterable[Event]) -> None:
        super()._note(events)
        self.departures.collect()

    def _export(self, c: Export) -> Exported:
        exported = super()._export(c)
        if exported.manifest is None or exported.manifest.reason:
            self.departures.withdraw((c.request, c.epoch))
        return exported

    def _parts(self, name: str, c: Export, form: Form) -> tuple[list[Kind], list[bytes]]:
        announced = self.departures.close(name, c, form).announced()
        announced["grammar"] = self._specs[name].grammar.encode()
        return list(KINDS), [announced[kind] for kind in KINDS]

    def _withdraw(self, c: Withdraw) -> None:
        self.departures.withdraw((c.request, c.epoch))

    def _thaw(self, c: Thaw) -> None:
        self.departures.withdraw((c.request, c.epoch))
        super()._thaw(c)

    # In

    def _expect(self, c: Expect) -> None:
        if (c.request, c.epoch) not in self._names:
            self.arrivals.expect(c)

    def _load(self, c: Load) -> Loaded | None:
        key = (c.request, c.epoch)
        try:
            name = self._names.get(key)
            under_way = self.arrivals.load(c, b"" if name is None else self._taken.get(name, b"another"))
        except NotLoaded as error:
            return Loaded(*key, str(error))
        return None if under_way else Loaded(*key)

    def _arrived(self, key: Key) -> Loaded | None:
        """The answer to a load, once there is one."""
        spec, name = self.arrivals.loads[key].command.spec, self._new_name(key)
        try:
            handoff = self.arrivals.arrived(key, name)
        except NotLoaded as error:
            self._note(self.engine.take_events())
            self._ends.pop(name, None)
            return Loaded(*key, str(error))
        if handoff is None:
            return None
        self._names[key], self._specs[name], self._taken[name] = name, spec, handoff
        return Loaded(*key)

    def _rename(self, c: Rename) -> None:
        self.arrivals.stop((c.request, c.epoch))
        super()._rename(c)

    # Ends

    def _drop(self, c: Drop) -> Dropped:
        key = (c.request, c.epoch)
        self.arrivals.stop(key)
        name = self._names.get(key, "")
        exported_prompt = name in self._given and name in self._outputs  # what it offers stays until `Withdraw`
        if name and not exported_prompt:
            self.departures.withdraw(key)
        self._taken.pop(name, None)
        return super()._drop(c)

    def _reform(self, c: Reform) -> Reformed:
        self.departures.clear("the group has ended")
        self.arrivals.clear()
        return super()._reform(c)


def _largest_state(engine: Engine) -> int:
    """Bytes that a state has at most: one that takes all of an engine."""
    cache = engine.cache
    blocks = sum(pool.bytes_per_block for pool in cache.pools.values()) * engine.config.num_blocks
    images = 0 if engine.images is None else engine.images.store.capacity
    return int(blocks + cache.slot_bytes + images + 64 * engine.context + _REST)
