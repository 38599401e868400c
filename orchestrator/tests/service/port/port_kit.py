"""Two ports over engines of their own, driven by hand as the cores would."""

from __future__ import annotations

import random
import time
from typing import Any

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.engine.sequence import State
from orchestrator.roles.engine_port import (
    Began,
    Begin,
    DecodeDone,
    Drop,
    Dropped,
    Expect,
    Export,
    Exported,
    Load,
    Loaded,
    PrefillChunk,
    RunDecode,
    RunPrefill,
    Withdraw,
)
from orchestrator.roles.handoff_port import decode_note
from orchestrator.roles.messages import Image, RequestSpec
from orchestrator.service.config import TransferSettings
from orchestrator.service.ports.streaming import StreamingPort
from orchestrator.service.spec import Place, encode_params
from orchestrator.transfer import Times

WAIT = 120.0
KINDS = ("local", "shared", "tcp")


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(500) for _ in range(length)]


def engine_of(model: Any, tokenizer: Any = None, **options: Any) -> Engine:
    return Engine(
        model, tokenizer, EngineConfig(**{"num_blocks": 24, "max_num_seqs": 4, "chunk_tokens": 130} | options)
    )


def port_of(
    model: Any, tokenizer: Any = None, *, kind: str = "tcp", overlap: bool = True, node: str = "here",
    times: Times | None = None, patience: float = 60.0, **options: Any,
) -> StreamingPort:  # fmt: skip
    """`times`: long leases, since a loaded machine is slow, unless a test is about them."""
    settings = TransferSettings(kind, overlap)
    return StreamingPort(
        engine_of(model, tokenizer, **options), host="127.0.0.1", node=node, settings=settings, room=3000,
        times=times or Times(lease=60.0, silence=20.0), patience=patience,
    )  # fmt: skip


def spec_of(prompt: list[int], params: SamplingParams, images: tuple[Any, ...] = ()) -> RequestSpec:
    """`images`: `PlacedImage`s."""
    places = tuple(
        Place(p.start, p.image.geometry.tokens, p.image.geometry.width, p.image.geometry.height, p.image.digest)
        for p in images
    )
    distinct = {p.image.digest.hex(): p.image.geometry.patches for p in images}
    grammar = "" if params.grammar is None else params.grammar.text
    return RequestSpec(
        tuple(prompt), params.max_tokens, params.seed or 0, grammar=grammar, params=encode_params(params, places),
        images=tuple(Image(*each) for each in distinct.items()),
    )  # fmt: skip


def ask(port: StreamingPort, command: Any, kind: type | None = None) -> Any:
    """The answer of this kind to a command, waited for."""
    port.do(command)
    return answer_of(port, kind) if kind is not None else None


def answer_of(port: StreamingPort, kind: type) -> Any:
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        found = [each for each in port.answers() if isinstance(each, kind)]
        if found:
            return found[0]
        time.sleep(0.005)
    raise AssertionError(f"no {kind.__name__}")


def eventually(true: Any, what: str = "") -> None:
    until = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def begin(port: StreamingPort, spec: RequestSpec, name: str = "r", **more: Any) -> Began:
    return ask(port, Begin(name, 1, spec, **more), Began)


def compute(port: StreamingPort, spec: RequestSpec, name: str = "r", upto: int | None = None, start: int = 0) -> None:
    end = len(spec.prompt) if upto is None else upto
    final = end == len(spec.prompt)
    port.do(RunPrefill(1, (PrefillChunk(name, 1, 0, start, end - start, final),)))
    port.answers()


def load_of(spec: RequestSpec, exported: Exported, name: str = "r") -> Load:
    assert exported.manifest is not None, exported.why
    return Load(name, 1, spec, exported.manifest, exported.parts)


def decode(port: StreamingPort, exported: Exported, name: str = "r") -> tuple[list[int], list[Any], str]:
    """All tokens, notes, and how it ended, after a load."""
    assert exported.manifest is not None
    tokens, notes = list(exported.manifest.output), list(exported.manifest.notes)
    for step in range(2000):
        done = ask(port, RunDecode(step, ((name, 1),)), DecodeDone)
        for output in done.outputs:
            tokens += output.tokens
            notes += output.notes
            if output.reason:
                return tokens, [decode_note(note) for note in notes], output.reason
    raise AssertionError("it does not end")


def hand_over(
    source: StreamingPort, target: StreamingPort, spec: RequestSpec, *, expect: bool = True, **more: Any
) -> tuple[list[int], list[Any], str]:
    """A request through both ports, as two cores have it done."""
    began = begin(source, spec, **more)
    assert not began.why, began.why
    if began.ticket and expect:
        target.do(Expect("r", 1, began.ticket))
    compute(source, spec)
    exported = ask(source, Export("r", 1), Exported)
    ask(source, Drop("r", 1), Dropped)
    check_engine(source)
    if exported.manifest is not None and exported.manifest.reason:
        ask(target, Drop("r", 1), Dropped)
        return (
            list(exported.manifest.output),
            [decode_note(n) for n in exported.manifest.notes],
            exported.manifest.reason,
        )
    loaded = ask(target, load_of(spec, exported), Loaded)
    assert loaded == Loaded("r", 1), loaded
    answer = decode(target, exported)
    ask(target, Drop("r", 1), Dropped)
    source.do(Withdraw("r", 1))
    return answer


def check_engine(port: StreamingPort) -> None:
    scheduler = port.engine.scheduler
    assert scheduler.blocks.used == scheduler.slots.used == 0
    assert not (scheduler.leaving or scheduler.running or scheduler.parked or scheduler.waiting)
    assert not port.engine._sequences
    assert all(s.state is State.FINISHED for s in port.engine._leavers)  # the next step forgets them
    if port.engine.images is not None:
        assert port.engine.images.counters.held_bytes == 0


def check_nothing_is_left(*ports: StreamingPort) -> None:
    """Engines, what is offered, what is fetched."""
    for port in ports:
        check_engine(port)
        eventually(lambda port=port: port.doors.sender.held == 0, "bytes are offered still")
        assert not (
            port.departures.ships
            or port.arrivals.fetches
            or port.arrivals.loads
            or port._names
            or port._given
            or port._taken
        )
        assert not (port._ends or port._specs or port._tokens or port._notes or port._outputs)
        eventually(lambda port=port: not any(f.thread.is_alive() for f in port.arrivals.ending), "a fetch goes on")
        assert all(not fetch.parts for fetch in port.arrivals.ending)


def alone(
    model: Any, prompt: list[int], params: SamplingParams, tokenizer: Any = None, images: Any = (), **options: Any
):
    """What one engine gives."""
    engine = engine_of(model, tokenizer, **options)
    engine.add("r", prompt, params, images=images)
    tokens, notes, end = [], [], ""
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                tokens.append(event.token_id)
                if event.logprob is not None:
                    notes.append((event.logprob, event.top_logprobs))
            elif isinstance(event, Finished):
                end = event.reason
    return tokens, notes, end
