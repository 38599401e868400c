"""The engine's side of a prefill or decode role: commands carried out by one `Engine`, states as bytes of its handoffs.

docs/handoff.md tells what a state consists of. Its parts travel as parts of the roles' manifest, one kind each; the
handoff's own checks come on top of the roles'.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from kernel_core.check import require
from orchestrator.engine.engine import Engine
from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.handoff.messages import Form
from orchestrator.engine.handoff.parts import HandoffRefused
from orchestrator.engine.prompt_room import has_room
from orchestrator.engine.request import EngineFull, Event, Finished, TokenOutput
from orchestrator.engine.sequence import State
from orchestrator.roles.engine_port import (
    Began,
    Begin,
    DecodeDone,
    DecodeOutput,
    Drop,
    Dropped,
    EngineEvent,
    Expect,
    Export,
    Exported,
    Load,
    Loaded,
    PrefillDone,
    Reform,
    Reformed,
    Rename,
    RunDecode,
    RunPrefill,
    Thaw,
    Withdraw,
)
from orchestrator.roles.messages import Key, RequestSpec
from orchestrator.roles.state_parts import KINDS, Kind, Manifest, part_of
from orchestrator.service.spec import Carried, decode_carried, decode_params, encode_params

__all__ = ["HandoffPort", "decode_note", "decode_params", "encode_params"]

_NAME = struct.Struct("<H")
_IDLE_STEPS = 10_000  # that bring a prompt no further: then something is wrong with the engine


def decode_note(note: bytes) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of a token, and its alternatives."""
    return msgspec.msgpack.decode(note, type=tuple[float, tuple[tuple[int, float], ...]])


def refuse(what: str, given: bool) -> None:
    """Raise ValueError for what a request has and cannot have here."""
    if given:
        raise ValueError(f"{what}: got some, allowed is none, since they do not travel between engines")


class HandoffPort:
    """`EnginePort` of a prefill or a decode core over one engine. For one thread.

    Steps are run inside of `do`. Notes of tokens are log-probabilities, see `decode_note`. Requests with images or with
    log-probabilities of their prompt are refused, since neither travels through it.

    Args:
        room: tokens of cache that a decode core is told after its group has formed anew.
        replay_tail: leave a prompt's last layers to the receiver, which replays its end (not after a replay).

    Attributes:
        layout: tag of the states that it makes and takes.
    """

    def __init__(self, engine: Engine, *, room: int = 0, replay_tail: bool = False) -> None:
        require(room >= 0, "room", room, "0 or more")
        self.engine, self.room, self.replay_tail = engine, room, replay_tail
        self.handoffs = Handoffs(engine)
        self.layout = f"handoff {self.handoffs.layout.hex()[:16]} {self.handoffs.model.hex()[:16]}"
        self._answers: list[EngineEvent] = []
        self._names: dict[Key, str] = {}
        self._ends: dict[str, Finished] = {}
        self._given: set[str] = set()
        self._specs: dict[str, RequestSpec] = {}
        self._tokens: dict[str, list[int]] = {}  # that came out of steps and were not told yet
        self._notes: dict[str, list[bytes]] = {}  # beside them
        self._outputs: dict[str, tuple[int, ...]] = {}  # that prompts came with
        self._number = 0

    def do(self, command: Any) -> None:
        handler = getattr(self, f"_{type(command).__name__.lower()}", None)
        if handler is None:
            raise TypeError(f"command: got {type(command).__name__}, which an engine without encoder has no use for")
        answer = handler(command)
        if answer is not None:
            self._answers.append(answer)

    def answers(self) -> list[EngineEvent]:
        answers, self._answers = self._answers, []
        return answers

    # Prefill

    def _begin(self, c: Begin) -> Began:
        key, known = (c.request, c.epoch), len(c.output)
        if not has_room(self.engine, len(c.spec.prompt) + known):
            return Began(*key, 0, "no room before other prompts have left")
        name = self._new_name(key)
        try:
            carried = decode_carried(c.spec)
            refuse("prompt_logprobs", carried.params.prompt_logprobs)
            self._add(name, c, carried, 0 if self.replay_tail and not known else known + 1)
        except ValueError as error:
            return Began(*key, 0, str(error), retry=False)
        except EngineFull as error:
            return Began(*key, 0, str(error))
        self._names[key], self._specs[name], self._outputs[name] = name, c.spec, c.output
        return Began(*key, 0, ticket=self._ahead(name, c))

    def _add(self, name: str, c: Begin, carried: Carried, leaves_at: int) -> None:
        refuse("images", bool(c.spec.images))
        self.engine.add(
            name, list(c.spec.prompt), carried.params, generated=c.output, seed=c.spec.seed, leaves_at=leaves_at
        )

    def _ahead(self, name: str, c: Begin) -> bytes:
        """A ticket, where parts are offered while the prompt is computed."""
        return b""

    def _runprefill(self, c: RunPrefill) -> PrefillDone:
        """Steps until the engine has come as far with each prompt as the core planned."""
        idle = 0
        while not self.is_computed(c):
            before = self.engine.forwards
            self._note(self.engine.step())
            idle = 0 if self.engine.forwards > before else idle + 1
            if idle > _IDLE_STEPS:
                raise RuntimeError(f"step {c.step}: the engine has work and computes nothing")
        return PrefillDone(c.step, 0.0, ahead=self.ahead(c))

    def is_computed(self, c: RunPrefill) -> bool:
        """Whether every prompt has come as far as planned, or has ended."""
        return not any(
            self._is_behind(self._names.get((k.request, k.epoch)), k.start + k.count, k.final) for k in c.chunks
        )

    def ahead(self, c: RunPrefill) -> tuple[tuple[str, int, int], ...]:
        """Prompts that have come further than planned, most of all by what was cached."""
        found = [(k, self.engine.find(self._names.get((k.request, k.epoch), ""))) for k in c.chunks]
        return tuple(
            (k.request, k.epoch, sequence.computed)
            for k, sequence in found
            if sequence is not None and sequence.computed > k.start + k.count
        )

    def _is_behind(self, name: str | None, tokens: int, final: bool) -> bool:
        sequence = None if name is None else self.engine.find(name)
        if sequence is None or sequence.state is State.LEAVING:
            return False
        return final or sequence.computed < tokens

    # State

    def _export(self, c: Export) -> Exported:
        key = (c.request, c.epoch)
        name = self._names.get(key, "")
        ended = self._ends.get(name)
        if ended is not None and name not in self._outputs:  # it was decoded here
            return Exported(*key, None, (), "it has ended, which the next step tells")
        if ended is not None and ended.reason in ("stop", "length"):
            spec = self._specs[name]
            known = tuple(self._outputs[name]) + tuple(self._tokens.pop(name, ()))
            notes = tuple(self._notes.pop(name, ()))
            manifest = Manifest(
                self.layout, len(spec.prompt), known, False, (), ended.reason, ended.cached_tokens, notes
            )
            return Exported(*key, manifest, ())
        sequence = self.engine.find(name) if name else None
        if sequence is None:
            return Exported(*key, None, (), "not in the engine" if ended is None else str(ended.error))
        replay = sequence.leaves_at == 0
        try:
            kinds, payloads = self._parts(name, c, "replay" if replay else "full")
        except (HandoffRefused, ValueError) as error:
            return Exported(*key, None, (), str(error))
        self._note(self.engine.take_events())  # of a step in flight, which was read for it
        self._tokens.pop(name, None)  # the state tells all; engines step requests that no command names as well
        self._given.add(name)
        manifest = Manifest(
            self.layout,
            len(sequence.tokens) - (0 if replay else 1),
            tuple(sequence.tokens[sequence.prompt_len :]),
            replay,
            tuple(map(part_of, kinds, payloads)),
            cached=sequence.hit,
            notes=tuple(self._notes.pop(name, ())),
        )
        return Exported(*key, manifest, tuple(payloads))

    def _parts(self, name: str, c: Export, form: Form) -> tuple[list[Kind], list[bytes]]:
        """A request's parts as the manifest numbers them. Raises HandoffRefused and ValueError."""
        kinds: list[Kind] = []
        payloads: list[bytes] = []
        for part, data in self.handoffs.give(name, form):
            kinds.append(cast(Kind, self.handoffs.kind(part)))
            payloads.append(_NAME.pack(len(part)) + part.encode() + bytes(data))
        kinds.append("grammar")  # the matcher is moved over the tokens anew; both sides have to mean the same by it
        payloads.append(self._specs[name].grammar.encode())
        for kind in set(KINDS) - set(kinds):
            kinds.append(kind)  # a replay has no windows, an engine without drafts no drafter
            payloads.append(b"")
        return kinds, payloads

    def _withdraw(self, c: Withdraw) -> None:
        """Parts are with the core: nothing is left here."""

    def _expect(self, c: Expect) -> None:
        """No ticket is given out here."""

    def _thaw(self, c: Thaw) -> None:
        name = self._names.get((c.request, c.epoch), "")
        if name in self._given:
            self._given.discard(name)
            self.handoffs.conclude(name, taken=False)

    def _load(self, c: Load) -> Loaded | None:
        key = (c.request, c.epoch)
        name = self._new_name(key)
        parts = []
        for part, payload in zip(c.manifest.parts, c.parts, strict=True):
            if part.kind == "grammar":
                if payload != c.spec.grammar.encode():
                    return Loaded(*key, "another grammar")
            elif payload:
                at = _NAME.size + _NAME.unpack_from(payload)[0]
                parts.append((payload[_NAME.size : at].decode(), payload[at:]))
        try:
            self.handoffs.take(parts, name)
        except HandoffRefused as error:
            return Loaded(*key, f"{error.reason}: {error}")
        self._names[key], self._specs[name] = name, c.spec
        return Loaded(*key)

    def _rename(self, c: Rename) -> None:
        self._names[c.request, c.new_epoch] = self._names.pop((c.request, c.epoch))

    # Decode

    def _rundecode(self, c: RunDecode) -> DecodeDone:
        self._note(self.engine.step())
        return DecodeDone(c.step, tuple(self._outputs_of(c)))

    def _outputs_of(self, c: RunDecode) -> list[DecodeOutput]:
        """What came out for these requests and was not told."""
        outputs = []
        for key in c.requests:
            name = self._names.get(key, "")
            end, tokens = self._ends.get(name), tuple(self._tokens.pop(name, ()))
            notes = tuple(self._notes.pop(name, ()))
            if end is not None:
                outputs.append(DecodeOutput(*key, tokens, end.reason, end.error or "", notes))
            elif tokens:
                outputs.append(DecodeOutput(*key, tokens, notes=notes))
        return outputs

    def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, TokenOutput):
                self._tokens.setdefault(event.request_id, []).append(event.token_id)
                if event.logprob is not None:
                    note = msgspec.msgpack.encode((event.logprob, event.top_logprobs))
                    self._notes.setdefault(event.request_id, []).append(note)
            elif isinstance(event, Finished):
                self._ends[event.request_id] = event

    # Ends

    def _drop(self, c: Drop) -> Dropped:
        name = self._names.pop((c.request, c.epoch), "")
        if name in self._given:
            self.handoffs.conclude(name, taken=True)
        elif name:
            self.engine.abort(name)
            self._note(self.engine.take_events())
        held: tuple[dict[str, Any], ...] = (self._ends, self._specs, self._tokens, self._notes, self._outputs)
        for each in held:
            each.pop(name, None)
        self._given.discard(name)
        return Dropped(c.request, c.epoch)

    def _reform(self, c: Reform) -> Reformed:
        for key in list(self._names):
            self._drop(Drop(*key))
        return Reformed(c.number, 1, float(self.room), self.engine.config.max_num_seqs)

    def _new_name(self, key: Key) -> str:
        self._number += 1
        return f"{key[0]} {key[1]} {self._number}"
