"""The checks themselves: each invariant is broken by hand, and has to be noticed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from orchestrator.roles import engine_port as port
from orchestrator.roles.messages import Deliver, DeliverEnd, DeliverReady, Holding, Report, Send, Submit, TokensAck
from orchestrator.simulate.checks.violation import INVARIANTS, Violation
from orchestrator.simulate.scenario import Scenario, Shape
from orchestrator.simulate.toy.engine import EngineShape
from orchestrator.simulate.workload import Asked, Mix
from orchestrator.simulate.world import World

ASKED = Asked(0.0, "r", "tenant0", tuple(range(10, 300)), most=6, seed=3)


@pytest.fixture
def world():
    """A service at rest, with one open stream of which nothing has come."""
    engine = EngineShape(blocks=40)
    shape = Shape(entries=1, encoders=1, prefills=1, decodes=1, prefill=engine, decode=engine)
    made = World(Scenario(1, 5.0, shape, Mix(rate=1e-6), every=0.0))
    made._until(3.0)
    made.clients.ask(ASKED)
    return made


def right(world, count, start=0):
    reference = world.clients.streams["r"].reference
    return tuple(reference.token(n) for n in range(start, start + count))


def tell(world, *events):
    for event in events:
        world.clients.on[type(event)]("entry-0", event)


READY = DeliverReady("r", len(ASKED.prompt), 128)
END = DeliverEnd("r", "finished", "length", 6)


def test_a_whole_stream_is_in_order(world):
    tell(world, READY, Deliver("r", 1, 0, right(world, 4)), Deliver("r", 2, 4, right(world, 2, 4)), END)
    assert world.clients.outcomes == {"finished": 1}
    world.watch.totals()


@pytest.mark.parametrize(
    ("invariant", "events"),
    [
        (1, [READY, ("tokens", 1, 1, 2)]),  # a gap
        (1, [READY, ("tokens", 1, 0, 2), ("tokens", 1, 1, 2)]),  # a repeat
        (1, [("tokens", 1, 0, 2)]),  # before usage
        (1, [READY, READY]),
        (1, [READY, ("tokens", 1, 0, 6), END, END]),
        (1, [READY, ("tokens", 1, 0, 6), END, ("tokens", 1, 0, 1)]),
        (1, [READY, ("tokens", 1, 0, 5), msgspec.structs.replace(END, tokens=5)]),  # too short
        (1, [READY, ("tokens", 1, 0, 6), msgspec.structs.replace(END, reason="stop")]),
        (1, [msgspec.structs.replace(END, outcome="cancelled", tokens=0)]),  # nobody asked for that
        (1, [msgspec.structs.replace(END, outcome="rejected", status=400, tokens=0)]),  # it fits
        (1, [msgspec.structs.replace(END, outcome="rejected", status=429, tokens=0)]),  # when to come again?
        (2, [READY, ("wrong", 1, 0, 2)]),
        (7, [READY, ("tokens", 2, 0, 2), ("tokens", 1, 2, 2)]),
        (10, [msgspec.structs.replace(READY, prompt_tokens=1)]),
        (10, [msgspec.structs.replace(READY, cached_tokens=len(ASKED.prompt))]),
        (10, [READY, ("tokens", 1, 0, 6), msgspec.structs.replace(END, tokens=5)]),
        (11, [msgspec.structs.replace(END, outcome="failed", reason="8 attempts failed", tokens=0)]),
    ],
)
def test_streams(world, invariant, events):
    made = []
    for event in events:
        if isinstance(event, tuple):
            what, epoch, index, count = event
            tokens = right(world, count, index)
            event = Deliver("r", epoch, index, tokens if what == "tokens" else tuple(t + 1 for t in tokens))
        made.append(event)
    tell(world, *made[:-1])
    with pytest.raises(Violation) as raised:
        tell(world, made[-1])
    assert raised.value.invariant == invariant
    assert INVARIANTS[invariant] in str(raised.value)


def test_a_prompt_that_fits_nowhere_must_not_be_answered(world):
    world.clients.ask(replace(ASKED, request="h", can_run=False))
    with pytest.raises(Violation, match="cannot have been held"):
        tell(world, DeliverEnd("h", "finished", "length", 0))


def breach(world, invariant, call):
    with pytest.raises(Violation) as raised:
        call()
    assert raised.value.invariant == invariant, raised.value


def test_blocks(world):
    breach(world, 3, lambda: world.watch.block_read("p", b"k" * 32, b"a", b"b"))
    engine = world.engines["prefill-0"]
    engine.cells.pool._free.pop()
    breach(world, 4, lambda: world.watch.engine(engine))


def test_the_store(world):
    index = world.store.index
    for n, parent in enumerate((b"", b"0" * 32)):
        index.publish(b"%d" % n * 32, parent, 512, 1.0, root=b"")
    world.watch.store_order()
    index._entries.pop(b"0" * 32)
    breach(world, 5, world.watch.store_order)


def test_rights(world):
    watch, decode = world.watch, world.machines["decode-0"]
    entry = world.machines["entry-0"]
    watch.stepped(entry, None, [Send("router", Submit("x", 3, "entry-0", None))])
    breach(world, 7, lambda: watch.stepped(entry, None, [Deliver("x", 2, 0, (1,))]))
    watch.stepped(decode, TokensAck("x", 3, 0), [])
    run = port.RunDecode(1, (("x", 3),))
    watch.stepped(decode, None, [run])
    decode.set_clock(jump=30.0)
    breach(world, 7, lambda: watch.stepped(decode, None, [run]))


def test_waiting_without_a_wake(world):
    machine = world.machines["entry-0"]
    assert machine.core.held and machine.wake is not None
    machine.wake = None
    breach(world, 8, lambda: world.watch.stepped(machine, None, []))


def test_budgets(world):
    watch, decode = world.watch, world.machines["decode-0"]
    report = Report("decode-0", "decode", 1000, 1, "active", (Holding("x", 1, "e", 5),), -1.0, 10.0)
    breach(world, 9, lambda: watch.stepped(decode, None, [Send("router", report)]))
    engine = world.engines["decode-0"]
    rows = tuple((f"x{n}", 1) for n in range(engine.shape.rows + 1))
    breach(world, 9, lambda: engine.do(port.RunDecode(1, rows)))


def test_totals(world):
    world.watch.totals()
    world.clients.delivered += 1
    breach(world, 10, world.watch.totals)
    world.clients.delivered -= 1
    world.clients.outcomes["finished"] += 1
    breach(world, 10, world.watch.totals)


def test_what_is_left_over(world):
    assert not world.watch.is_quiet()
    breach(world, 11, world.watch.not_quiet)
    world._until(20.0)
    assert world.watch.is_quiet()
    world.engines["decode-0"].cells.take(1)
    assert not world.watch.is_quiet()
    breach(world, 4, world.watch.not_quiet)


def test_a_request_whose_client_left_is_gone(world):
    world._until(world.queue.now + 0.02)
    stream = world.clients.streams["r"]
    world.watch.is_gone("r")  # open: nothing to say
    stream.state = "cancelled"
    breach(world, 4, lambda: world.watch.is_gone("r"))


def test_a_core_that_raises_is_a_violation(world):
    world.queue.after(0.01, world.machines["entry-0"].handle, object())
    breach(world, 8, lambda: world._until(world.queue.now + 1.0))
