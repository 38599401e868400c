"""Cancels, deaths and wrong states at each point: both sides end at their baseline, and nothing wrong is continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from port_kit import (
    alone,
    answer_of,
    ask,
    begin,
    check_engine,
    check_nothing_is_left,
    compute,
    decode,
    eventually,
    hand_over,
    load_of,
    port_of,
    prompt_of,
    spec_of,
)

from orchestrator.engine.launch import InOrder
from orchestrator.engine.request import SamplingParams
from orchestrator.roles.engine_port import (
    DecodeDone,
    Drop,
    Dropped,
    Expect,
    Export,
    Exported,
    Load,
    Loaded,
    Reform,
    Reformed,
    Rename,
    RunDecode,
    Thaw,
    Withdraw,
)
from orchestrator.roles.handoff_port import decode_note
from orchestrator.roles.state_parts import part_of
from orchestrator.service.ports.tickets import Announced, pack, unpack, unpack_announced
from orchestrator.transfer import Times

PROMPT = prompt_of(400, 1)
PARAMS = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
SPEC = spec_of(PROMPT, PARAMS)
SHORT = Times(beat=0.1, silence=0.5, lease=1.5)


@pytest.fixture(params=[True, False], ids=["ahead", "at the end"])
def ports(nano, request):
    source, target = (port_of(nano, kind="shared", overlap=request.param) for _ in range(2))
    yield source, target
    source.close()
    target.close()


def ready(source, target, expect=True):
    """A prompt that is computed and exported, with nothing loaded."""
    began = begin(source, SPEC)
    if began.ticket and expect:
        target.do(Expect("r", 1, began.ticket))
    compute(source, SPEC)
    return ask(source, Export("r", 1), Exported)


POINTS = ["begun", "expected", "in the midst", "exported", "dropped at the source", "loading", "loaded", "decoding"]


@pytest.mark.parametrize("point", POINTS)
def test_a_cancel_at_each_point_frees_everything(nano, ports, point):
    source, target = ports
    at = POINTS.index(point)
    began = begin(source, SPEC)
    if at >= 1 and began.ticket:
        target.do(Expect("r", 1, began.ticket))
    if at >= 2:
        compute(source, SPEC, upto=260)
        if began.ticket:
            eventually(lambda: target.arrivals.fetches["r", 1].size > 0)
    if at >= 3:
        compute(source, SPEC, start=260)
        exported = ask(source, Export("r", 1), Exported)
    if at >= 4:
        ask(source, Drop("r", 1), Dropped)
        check_engine(source)
        assert source.doors.sender.held > 0 or began.ticket
    if at >= 5:
        target.do(load_of(SPEC, exported))
    if at >= 6:
        assert answer_of(target, Loaded) == Loaded("r", 1)
    if at >= 7:
        ask(target, RunDecode(1, (("r", 1),)), DecodeDone)
    ask(target, Drop("r", 1), Dropped)
    if at < 4:
        ask(source, Drop("r", 1), Dropped)
    source.do(Withdraw("r", 1))
    check_nothing_is_left(source, target)
    assert not [answer for answer in target.answers() if isinstance(answer, Loaded)]
    assert hand_over(source, target, SPEC) == alone(nano, PROMPT, PARAMS), "the same name, once more"
    check_nothing_is_left(source, target)


def test_a_group_that_ends_takes_its_transfers_along(ports):
    source, target = ports
    exported = ready(source, target)
    target.do(load_of(SPEC, exported))
    ask(target, Reform(1), Reformed)
    ask(source, Reform(1), Reformed)
    check_nothing_is_left(source, target)


def test_a_source_that_drops_in_the_midst_fails_the_load(ports):
    source, target = ports
    exported = ready(source, target, expect=False)
    ask(source, Drop("r", 1), Dropped)
    source.do(Withdraw("r", 1))
    loaded = ask(target, load_of(SPEC, exported), Loaded)
    assert loaded.why.startswith(("cancelled", "unknown"))
    ask(target, Drop("r", 1), Dropped)
    check_nothing_is_left(source, target)
    assert sum(count for name, count in target.arrivals.counts.items() if name.startswith("not loaded")) == 1


def test_a_second_fetch_of_one_state_is_refused(nano, ports):
    source, target = ports
    other = port_of(nano, kind="shared")
    try:
        exported = ready(source, target)
        target.do(load_of(SPEC, exported))
        assert answer_of(target, Loaded) == Loaded("r", 1)
        assert ask(other, load_of(SPEC, exported), Loaded).why
        check_engine(other)
        ask(source, Drop("r", 1), Dropped)
        source.do(Withdraw("r", 1))
        assert decode(target, exported) == alone(nano, PROMPT, PARAMS)
        ask(target, Drop("r", 1), Dropped)
        ask(other, Drop("r", 1), Dropped)
        check_nothing_is_left(source, target, other)
    finally:
        other.close()


def test_a_load_that_is_repeated_is_one_load(nano, ports):
    source, target = ports
    exported = ready(source, target)
    target.do(load_of(SPEC, exported))
    target.do(load_of(SPEC, exported))
    assert answer_of(target, Loaded) == Loaded("r", 1)
    assert ask(target, load_of(SPEC, exported), Loaded) == Loaded("r", 1)
    assert target.arrivals.counts["handoffs in"] == 1
    ask(source, Drop("r", 1), Dropped)
    source.do(Withdraw("r", 1))
    assert decode(target, exported) == alone(nano, PROMPT, PARAMS)
    ask(target, Drop("r", 1), Dropped)
    check_nothing_is_left(source, target)


# States that are not the one


def changed(exported, change):
    """An export whose tickets are others."""
    parts = []
    for part, payload in zip(exported.manifest.parts, exported.parts, strict=True):
        if part.kind != "grammar" and payload:
            said = unpack_announced(payload)
            payload = pack(Announced(pack(change(unpack(said.ticket))), said.parts, said.size))
        parts.append((part.kind, payload))
    manifest = msgspec.structs.replace(exported.manifest, parts=tuple(part_of(*each) for each in parts))
    return Exported("r", 1, manifest, tuple(payload for _, payload in parts))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: msgspec.structs.replace(t, handoff=bytes(32)),
        lambda t: msgspec.structs.replace(t, epoch=2),
        lambda t: msgspec.structs.replace(t, shared="", port=0),
        lambda t: msgspec.structs.replace(t, node="elsewhere"),
    ],
)
def test_a_wrong_ticket_loads_nothing(nano, ports, change):
    source, target = ports
    exported = ready(source, target)
    wrong = changed(exported, change)
    assert ask(target, load_of(SPEC, wrong), Loaded).why
    check_engine(target)
    ask(target, Drop("r", 1), Dropped)
    ask(source, Drop("r", 1), Dropped)
    source.do(Withdraw("r", 1))
    check_nothing_is_left(source, target)


@pytest.mark.parametrize("parts", ["none", "garbage", "long", "two tickets", "another kind"])
def test_parts_that_are_no_tickets_load_nothing(ports, parts):
    source, target = ports
    exported = ready(source, target)
    payloads = list(exported.parts)
    kinds = [part.kind for part in exported.manifest.parts]
    one = kinds.index("global")
    if parts == "none":
        payloads = [b"" if kind != "grammar" else p for kind, p in zip(kinds, payloads, strict=True)]
    elif parts == "garbage":
        payloads[one] = b"\xc1"
    elif parts == "long":
        payloads = [
            pack(Announced(bytes(5000), 1, 1)) if k != "grammar" else p for k, p in zip(kinds, payloads, strict=True)
        ]
    elif parts == "two tickets":
        said = unpack_announced(payloads[one])
        other = msgspec.structs.replace(unpack(said.ticket), handoff=bytes(32))
        payloads[one] = pack(Announced(pack(other), said.parts, said.size))
    else:
        said = unpack_announced(payloads[one])
        payloads[one] = pack(Announced(said.ticket, said.parts + 1, said.size))
    assert ask(target, Load("r", 1, SPEC, exported.manifest, tuple(payloads)), Loaded).why
    check_engine(target)
    ask(target, Drop("r", 1), Dropped)
    ask(source, Drop("r", 1), Dropped)
    source.do(Withdraw("r", 1))
    check_nothing_is_left(source, target)


@pytest.mark.parametrize("name", ["another", "r"])
def test_a_state_of_another_request_or_other_tokens_is_not_taken(ports, name):
    source, target = ports
    exported = ready(source, target, expect=False)
    spec = SPEC if name != "r" else spec_of([*PROMPT[:-1], (PROMPT[-1] + 1) % 500], PARAMS)
    loaded = ask(target, Load(name, 1, spec, exported.manifest, exported.parts), Loaded)
    assert loaded.why.startswith("key" if name != "r" else "state")
    check_engine(target)
    ask(target, Drop(name, 1), Dropped)
    ask(source, Drop("r", 1), Dropped)
    source.do(Withdraw("r", 1))
    check_nothing_is_left(source, target)


def test_a_wrong_ticket_in_expect_is_counted_and_harmless(nano, ports):
    source, target = ports
    for ticket in (b"", b"\xc1", bytes(5000)):
        target.do(Expect("r", 1, ticket))
    assert target.arrivals.counts["not fetched: ticket"] == 3
    assert hand_over(source, target, SPEC) == alone(nano, PROMPT, PARAMS)
    check_nothing_is_left(source, target)


# Leases


def test_a_target_that_is_silent_frees_what_was_offered(nano):
    source = port_of(nano, times=SHORT)
    try:
        begin(source, SPEC)
        compute(source, SPEC)
        ask(source, Export("r", 1), Exported)
        ask(source, Drop("r", 1), Dropped)
        check_engine(source)
        eventually(lambda: source.doors.sender.held == 0)
        source.do(Withdraw("r", 1))
        check_nothing_is_left(source)
    finally:
        source.close()


def test_what_went_ahead_in_vain_goes_at_the_end(nano):
    """No target has asked within the lease: the whole state is offered anew."""
    source, target = port_of(nano, times=SHORT), port_of(nano)
    try:
        begin(source, SPEC)
        compute(source, SPEC, upto=260)
        eventually(lambda: not source.departures.ships["r", 1].alive)
        compute(source, SPEC, start=260)
        exported = ask(source, Export("r", 1), Exported)
        assert ask(target, load_of(SPEC, exported), Loaded) == Loaded("r", 1)
        ask(source, Drop("r", 1), Dropped)
        source.do(Withdraw("r", 1))
        assert decode(target, exported) == alone(nano, PROMPT, PARAMS)
        ask(target, Drop("r", 1), Dropped)
        check_nothing_is_left(source, target)
    finally:
        source.close()
        target.close()


def test_a_source_that_never_ends_fails_the_load(nano):
    """It lives, and offers no more: the load has its own time."""
    source, target = port_of(nano), port_of(nano, patience=1.0)
    try:
        other = port_of(nano, overlap=False)
        exported = ready(other, target)
        began = begin(source, SPEC)
        target.do(Expect("r", 1, began.ticket))
        stuck = changed(exported, lambda _: unpack(began.ticket))
        loaded = ask(target, load_of(SPEC, stuck), Loaded)
        assert loaded.why.startswith("lease")
        ask(target, Drop("r", 1), Dropped)
        for port in (source, other):
            ask(port, Drop("r", 1), Dropped)
            port.do(Withdraw("r", 1))
        check_nothing_is_left(source, target, other)
        other.close()
    finally:
        source.close()
        target.close()


# Migration


def test_a_running_request_moves_and_goes_on(nano, ports):
    source, target = ports
    third = port_of(nano, kind="shared")
    try:
        exported = ready(source, target)
        assert ask(target, load_of(SPEC, exported), Loaded) == Loaded("r", 1)
        ask(source, Drop("r", 1), Dropped)
        source.do(Withdraw("r", 1))
        tokens = list(exported.manifest.output)
        for step in range(4):
            (output,) = ask(target, RunDecode(step, (("r", 1),)), DecodeDone).outputs
            tokens += output.tokens
        moved = ask(target, Export("r", 1), Exported)
        assert list(moved.manifest.output) == tokens
        target.do(Thaw("r", 1))
        (output,) = ask(target, RunDecode(9, (("r", 1),)), DecodeDone).outputs
        tokens += output.tokens
        moved = ask(target, Export("r", 1), Exported)
        assert ask(third, load_of(SPEC, moved), Loaded) == Loaded("r", 1)
        ask(target, Drop("r", 1), Dropped)
        third.do(Rename("r", 1, 2))
        while len(tokens) < 20:
            (output,) = ask(third, RunDecode(len(tokens), (("r", 2),)), DecodeDone).outputs
            tokens += output.tokens
        assert tokens == alone(nano, PROMPT, PARAMS)[0]
        ask(third, Drop("r", 2), Dropped)
        check_nothing_is_left(source, target, third)
    finally:
        third.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 40])
def test_what_was_computed_unasked_is_told_once(nano, steps, overlap):
    """An engine steps all that it holds. A move that comes to nothing must not make those tokens come twice."""
    prompt, params = prompt_of(20, 3), SamplingParams(max_tokens=200, ignore_eos=True, logprobs=2)
    other = spec_of(prompt, params)
    mine = spec_of(PROMPT, replace(PARAMS, logprobs=1))
    source, target = port_of(nano), port_of(nano)
    if overlap:
        target.engine.overlap(InOrder())
    try:
        states = {}
        for name, spec in (("other", other), ("r", mine)):
            assert not begin(source, spec, name).why
            compute(source, spec, name)
            states[name] = ask(source, Export(name, 1), Exported)
            assert ask(target, load_of(spec, states[name], name), Loaded) == Loaded(name, 1)
            ask(source, Drop(name, 1), Dropped)
            source.do(Withdraw(name, 1))
        tokens, notes = list(states["r"].manifest.output), list(states["r"].manifest.notes)
        for step in range(steps):
            assert all(o.request == "other" for o in ask(target, RunDecode(step, (("other", 1),)), DecodeDone).outputs)
        moved = ask(target, Export("r", 1), Exported)
        if moved.manifest is not None:
            assert list(moved.manifest.output)[: len(tokens)] == tokens and steps < 20
            tokens, notes = list(moved.manifest.output), notes + list(moved.manifest.notes)
        else:
            assert "ended" in moved.why and steps == 40
        target.do(Thaw("r", 1))
        end = ""
        while not end:
            for output in ask(target, RunDecode(99, (("r", 1),)), DecodeDone).outputs:
                tokens, notes, end = tokens + list(output.tokens), notes + list(output.notes), output.reason
        expected = alone(nano, PROMPT, replace(PARAMS, logprobs=1))
        assert (tokens, [decode_note(note) for note in notes], end) == expected
        for name in states:
            ask(target, Drop(name, 1), Dropped)
        target.engine.step()  # reads the one that was in flight when the other request was dropped
        check_nothing_is_left(source, target)
    finally:
        source.close()
        target.close()


# Deaths

SOURCE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from port_kit import *
import torch
from orchestrator.model.load import load_model
torch.set_num_threads(1)
source = port_of(load_model(sys.argv[1]), kind=sys.argv[3])
spec = spec_of(prompt_of(400, 1), SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
began = begin(source, spec)
compute(source, spec, upto=260)
print(began.ticket.hex(), flush=True)
if sys.stdin.readline().strip() == "export":
    compute(source, spec, start=260)
    exported = ask(source, Export("r", 1), Exported)
    import msgspec
    print(msgspec.msgpack.encode(exported).hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_source_that_is_killed_in_the_midst_fails_the_load(nano, nano_path, kind):
    target = port_of(nano, kind=kind, times=Times(lease=4.0), patience=60.0)
    command = [sys.executable, "-c", SOURCE, str(nano_path), str(Path(__file__).parent), kind]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        ticket = bytes.fromhex(child.stdout.readline())
        target.do(Expect("r", 1, ticket))
        eventually(lambda: target.arrivals.fetches["r", 1].size > 1000)
        other = port_of(nano, kind=kind, overlap=False)
        exported = changed(ready(other, target), lambda _: unpack(ticket))
        os.kill(child.pid, signal.SIGKILL)
        began = time.monotonic()
        loaded = ask(target, load_of(SPEC, exported), Loaded)
        assert loaded.why.startswith("lease") and time.monotonic() - began < 60
        check_engine(target)
        ask(target, Drop("r", 1), Dropped)
        ask(other, Drop("r", 1), Dropped)
        other.do(Withdraw("r", 1))
        check_nothing_is_left(target, other)
        other.close()
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        target.close()


def test_another_process_is_a_source(nano, nano_path):
    target = port_of(nano, kind="auto")
    command = [sys.executable, "-c", SOURCE, str(nano_path), str(Path(__file__).parent), "auto"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        target.do(Expect("r", 1, bytes.fromhex(child.stdout.readline())))
        child.stdin.write("export\n")
        child.stdin.flush()
        exported = msgspec.msgpack.decode(bytes.fromhex(child.stdout.readline()), type=Exported)
        assert ask(target, load_of(SPEC, exported), Loaded) == Loaded("r", 1)
        assert decode(target, exported) == alone(nano, PROMPT, PARAMS)
        ask(target, Drop("r", 1), Dropped)
        check_nothing_is_left(target)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        target.close()
