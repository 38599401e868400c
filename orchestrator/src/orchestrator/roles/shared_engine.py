"""One engine behind a prefill and a decode core: a request goes from one to the other by reference, without a copy.

The engine's own scheduler mixes chunks of prompts with decode steps, so prefill steps are not run apart here: a prompt
is handed over as soon as the engine has it, and its chunks are computed in the steps that the decode core asks for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.engine.engine import Engine
from orchestrator.engine.request import EngineFull, Event, Finished, Ready, SamplingParams, TokenOutput
from orchestrator.roles.engine_port import (
    Began,
    Begin,
    DecodeDone,
    DecodeOutput,
    Drop,
    Dropped,
    EngineEvent,
    Export,
    Exported,
    Load,
    Loaded,
    PrefillDone,
    RunDecode,
    RunPrefill,
    Withdraw,
)
from orchestrator.roles.messages import Key
from orchestrator.roles.state_parts import KINDS, Manifest, part_of

LAYOUT = "by reference"


@dataclass
class Reference:
    """What a request's messages do not carry.

    Attributes:
        name: of the request for its client and the engine; the roles have a name of their own that never comes again.
        options: of `Engine.add`. ready, tokens, finished: events of the engine that were not passed on yet.
        entered: the engine has had it. error: why the engine would not take it.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)
    ready: Ready | None = None
    tokens: deque[TokenOutput] = field(default_factory=deque)
    finished: Finished | None = None
    entered: bool = False
    error: Exception | None = None


class SharedEngine:
    """Attributes:
    references: by the roles' name of the request. run: the decode step that was asked for and not run yet.
    late: prompts that the engine had no room to queue.
    """

    def __init__(self, engine: Engine, ready: Callable[[Ready], None]) -> None:
        self.engine = engine
        self.references: dict[str, Reference] = {}
        self.run: RunDecode | None = None
        self.late: deque[Begin] = deque()
        self._ready = ready
        self._others: list[Event] = []  # events that came up while something else was asked for
        self._handed: dict[Key, bool] = {}  # whether the decode core has it, by those that the engine has
        self._keys: dict[str, Key] = {}  # of what the engine has, by its name there

    # Prefill

    def prefill(self, command: Any) -> list[EngineEvent]:
        """Carry out a command of the prefill core."""
        if isinstance(command, Begin):
            return self._begin(command)
        if isinstance(command, RunPrefill):
            return [PrefillDone(command.step, 0.0)]
        if isinstance(command, Export):
            return [self._export(command)]
        if isinstance(command, Withdraw):
            return []
        if isinstance(command, Drop):
            self.late = deque(b for b in self.late if (b.request, b.epoch) != (command.request, command.epoch))
            if not self._handed.get((command.request, command.epoch), True):
                self._abort(command)
            return [Dropped(command.request, command.epoch)]
        raise TypeError(f"command: got {type(command).__name__}, which a prefill core has no use for here")

    def _begin(self, command: Begin) -> list[EngineEvent]:
        reference = self.references[command.request]
        try:
            self.engine.add(
                reference.name,
                reference.prompt,
                reference.params,
                generated=command.output,
                **reference.options,
            )
        except EngineFull:
            self.late.append(command)
            return []
        except ValueError as error:
            reference.error = error
            return [Began(command.request, command.epoch, 0, str(error), retry=False)]
        reference.entered = True
        self._handed[command.request, command.epoch] = False
        self._keys[reference.name] = (command.request, command.epoch)
        return [Began(command.request, command.epoch, 0)]

    def begin_late(self) -> list[EngineEvent]:
        """Have the engine queue what it had no room for."""
        answers: list[EngineEvent] = []
        for _ in range(len(self.late)):
            answers += self._begin(self.late.popleft())
        return answers

    def _export(self, command: Export) -> Exported:
        key = (command.request, command.epoch)
        if key not in self._handed:
            return Exported(*key, None, (), "not in the engine")
        self._handed[key] = True
        reference = self.references[command.request]
        parts = tuple(f"{kind} of {key}".encode() for kind in KINDS)
        manifest = Manifest(LAYOUT, len(reference.prompt), (), False, tuple(map(part_of, KINDS, parts)))
        return Exported(*key, manifest, parts)

    # Decode

    def decode(self, command: Any) -> list[EngineEvent]:
        """Carry out a command of the decode core; `RunDecode` is kept for `step`."""
        if isinstance(command, Load):
            there = self._handed.get((command.request, command.epoch), False)
            return [Loaded(command.request, command.epoch, "" if there else "not in the engine")]
        if isinstance(command, RunDecode):
            self.run = command
            return []
        if isinstance(command, Drop):
            self._abort(command)
            return [Dropped(command.request, command.epoch)]
        raise TypeError(f"command: got {type(command).__name__}, which a decode core has no use for here")

    def step(self) -> list[EngineEvent]:
        """Run one step of the engine; its answer, if it was asked for."""
        others, self._others = self._others, []
        outputs = self._take(others + self.engine.step())
        run, self.run = self.run, None
        return [] if run is None else [DecodeDone(run.step, outputs)]

    def _take(self, events: list[Event]) -> tuple[DecodeOutput, ...]:
        tokens: dict[Key, list[int]] = {}
        ends: dict[Key, Finished] = {}
        for event in events:
            key = self._keys.get(event.request_id)
            if key is None:
                continue  # it has ended
            reference = self.references[key[0]]
            if isinstance(event, Ready):
                reference.ready = event
                self._ready(event)
            elif isinstance(event, TokenOutput):
                reference.tokens.append(event)
                tokens.setdefault(key, []).append(event.token_id)
            else:
                reference.finished = event
                ends[key] = event
                self._forget(key)
        return tuple(_output(key, tokens.get(key, ()), ends.get(key)) for key in {**tokens, **ends})

    def _abort(self, command: Drop) -> None:
        key = (command.request, command.epoch)
        if key not in self._handed:
            return
        reference = self.references[command.request]
        self._forget(key)
        self.engine.abort(reference.name)
        for event in self.engine.take_events():
            if isinstance(event, Finished) and event.request_id == reference.name:
                reference.finished = event
            else:
                self._others.append(event)

    def _forget(self, key: Key) -> None:
        del self._handed[key]
        del self._keys[self.references[key[0]].name]


def _output(key: Key, tokens: Any, end: Finished | None) -> DecodeOutput:
    if end is None:
        return DecodeOutput(*key, tuple(tokens))
    return DecodeOutput(*key, tuple(tokens), end.reason, end.error or "")
