"""What the simulator found in the roles, each as a case of its own: seeds change their histories, these do not."""

from __future__ import annotations

from orchestrator.balance.admission import Limits
from orchestrator.roles import engine_port as port
from orchestrator.roles.decode import Decode, DecodeOptions
from orchestrator.roles.messages import (
    Accepted,
    AssignImage,
    AssignPrefill,
    Holding,
    Image,
    LoadReport,
    Offer,
    Piece,
    Refused,
    Report,
    RequestSpec,
    Reserve,
    Send,
    Start,
    Submit,
    Tick,
    TokensAck,
    WorkFailed,
)
from orchestrator.roles.prefill import Prefill
from orchestrator.roles.router import Router, RouterPolicy
from orchestrator.roles.state_parts import KINDS, Manifest, part_of

SPEC = RequestSpec(tuple(range(200)), 8, expected_output=8)


def sent(actions, kind):
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def asked(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def assign(core, request, now):
    order = AssignPrefill(request, 1, core.incarnation, "e", SPEC, (), "d", 1000)
    return core.step(order, now)


def test_a_prompt_waits_for_memory_that_others_hold():
    """It used to fail at once; eight quick attempts later an accepted request was lost."""
    core = Prefill("p")
    core.step(Start(), 0.0)
    assign(core, "a", 0.1)
    core.step(port.Began("a", 1, 0), 0.2)
    assign(core, "b", 0.3)
    actions = core.step(port.Began("b", 1, 0, "no memory"), 0.4)
    assert not sent(actions, WorkFailed) and ("b", 1) in core.held
    assert [report.room for report in sent(actions, Report)] == [0.0]
    actions = core.step(port.PrefillDone(1, 0.1, 0, (("a", 1, "not a number"),)), 0.5)
    assert asked(actions, port.Drop) and not asked(actions, port.Begin)
    actions = core.step(port.Dropped("a", 1), 0.6)
    assert [begin.request for begin in asked(actions, port.Begin)] == ["b"]
    actions = core.step(port.Began("b", 1, 0), 0.7)
    assert asked(actions, port.RunPrefill)


def test_a_prompt_that_an_empty_engine_has_no_memory_for_fails():
    core = Prefill("p")
    core.step(Start(), 0.0)
    assign(core, "a", 0.1)
    actions = core.step(port.Began("a", 1, 0, "no memory"), 0.2)
    assert [failed.why for failed in sent(actions, WorkFailed)] == ["no memory"]


def router(**limits):
    core = Router(1, RouterPolicy(limits=Limits(4096, 4096, **limits), load=1.0))
    core.step(Start(), 0.0)
    return core


class Worker:
    """Says what a worker would say."""

    def __init__(self, name, role, room, rows=0):
        self.name, self.role, self.room, self.rows, self.number = name, role, room, rows, 0

    def report(self, core, now, *held, life="active"):
        self.number += 1
        holding = tuple(Holding(request, 1, "e", 300, decoding=True) for request in held)
        message = Report(self.name, self.role, 1000, self.number, life, holding, self.room, self.room, self.rows)
        return core.step(message, now)


def submit(core, request, now, **fields):
    spec = RequestSpec(SPEC.prompt, 8, expected_output=8, **fields)
    return core.step(Submit(request, 1, "e", spec), now)


def ticks(core, now, seconds, *workers):
    """Beats with reports in between; returns all that was done."""
    actions, end = [], now + seconds
    while now < end:
        now += 0.5
        for worker, held in workers:
            actions += worker.report(core, now, *held)
        actions += core.step(Tick(), now)
    return actions


def test_requests_that_wait_for_rows_are_load_of_decode():
    """Two rows in use of two were a sixth of the cache: the scaler sent workers away while requests waited."""
    core = router()
    p, d = Worker("p", "prefill", 2.0), Worker("d", "decode", 4000, rows=2)
    ticks(core, 0.0, 3.0, (p, ()), (d, ("x", "y")))
    for n in range(5):
        assert sent(submit(core, f"r{n}", 3.1), Accepted)
    loads = sent(ticks(core, 3.2, 3.0, (p, ()), (d, ("x", "y"))), LoadReport)
    decode = next(load for load in loads[-1].roles if load.role == "decode")
    assert decode.use == 1.0 and decode.requests == 7


def test_a_queue_that_decode_holds_up_is_refused():
    """Admission looked at the time of prefill only: whoever waited for decode was let in, and failed after minutes."""
    core = router(target=1.0, patience=2.0)
    p, d = Worker("p", "prefill", 2.0), Worker("d", "decode", 4000, rows=1)
    ticks(core, 0.0, 3.0, (p, ()), (d, ("x",)))
    refused = []
    for n in range(8):
        now = 3.1 + 4 * n
        refused += sent(submit(core, f"r{n}", now), Refused)
        ticks(core, now, 3.0, (p, ()), (d, ("x",)))
    assert refused and all(r.status == 429 and r.retry_after >= 1 for r in refused)


def test_an_encoder_that_leaves_gets_no_new_image():
    """It was asked again and again, and refused again and again, until the request had used up its attempts."""
    core = router()
    a = Worker("a", "encoder", 5000)
    ticks(core, 0.0, 3.0, (a, ()), (Worker("p", "prefill", 2.0), ()))
    a.report(core, 3.1, life="draining")
    assert not sent(submit(core, "r", 3.2, images=(Image("i", 10),)), AssignImage)
    b = Worker("b", "encoder", 5000)
    actions = b.report(core, 3.3) + ticks(core, 3.3, 1.0, (b, ()))
    assert {message.request for message in sent(actions, AssignImage)} == {"r"}


def test_the_router_tells_workers_in_an_order_that_no_hash_decides():
    core = router()
    names = [f"encoder{n}" for n in range(6)]
    workers = [Worker(name, "encoder", 5000) for name in names] + [Worker("p", "prefill", 2.0)]
    ticks(core, 0.0, 3.0, *((worker, ()) for worker in workers))
    submit(core, "r", 3.1, images=tuple(Image(f"i{n}", 4000) for n in range(6)))
    record = core.records["r"]
    wanted = list(dict.fromkeys(record.encoders.values()))
    assert len(wanted) > 2
    actions = []
    core.release(record, 3.2, ended=True)
    actions += core.step(Tick(), 3.2)
    told = [a.to for a in actions if isinstance(a, Send) and type(a.message).__name__ == "Release"]
    assert told == wanted


def test_a_decode_worker_that_was_stopped_lets_go_before_its_next_step():
    """After a long pause it ran one step more of a request whose owner had given it to somebody else."""
    core = Decode("d", DecodeOptions(tokens=4096, rows=4, layout="toy/1"))
    core.step(Start(), 0.0)
    order = Reserve("r", 1, core.incarnation, "e", SPEC, (), "p", 1000, 300)
    core.step(order, 0.1)
    source = ("p", 1000, core.incarnation)
    pieces = {kind: b"x" for kind in KINDS}
    manifest = Manifest("toy/1", 200, (5,), False, tuple(part_of(kind, data) for kind, data in pieces.items()))
    core.step(Offer("r", 1, *source, manifest), 0.2)
    actions = []
    for number, data in enumerate(pieces.values()):
        actions += core.step(Piece("r", 1, 1000, number, data), 0.3)
    assert asked(actions, port.Load)
    (run,) = asked(core.step(port.Loaded("r", 1), 0.4), port.RunDecode)
    core.step(TokensAck("r", 1, 1), 0.5)
    late = 0.6 + core.settings.owner_lease
    done = port.DecodeDone(run.step, (port.DecodeOutput("r", 1, (7,)),))
    assert not asked(core.step(done, late), port.RunDecode)
    core.step(TokensAck("r", 1, 2), late)  # its owner is there after all
    assert asked(core.step(Tick(), late + 1), port.RunDecode)


def test_reservations_are_not_refused_for_want_of_a_word():
    """Reserve and AssignPrefill go out together, to the pair that was chosen."""
    core = router()
    p, d = Worker("p", "prefill", 2.0), Worker("d", "decode", 4000, rows=2)
    ticks(core, 0.0, 3.0, (p, ()), (d, ()))
    actions = submit(core, "r", 3.1)
    assert len(sent(actions, Reserve)) == len(sent(actions, AssignPrefill)) == 1
