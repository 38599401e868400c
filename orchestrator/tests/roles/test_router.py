"""The router: what waits, what is given out, what it learns from reports, what it forgets."""

import pytest
from roles_kit import image, only

from orchestrator.balance.admission import Limits
from orchestrator.balance.paths import PathSettings
from orchestrator.roles import Router, RouterPolicy, Settings
from orchestrator.roles.messages import (
    Accepted,
    AssignImage,
    AssignPrefill,
    Gone,
    Holding,
    ImageReady,
    LoadReport,
    Lost,
    MoveTo,
    MoveWanted,
    Refused,
    Release,
    Released,
    Report,
    ReportAck,
    RequestSpec,
    Reserve,
    Send,
    SourceGone,
    Start,
    Submit,
    Tick,
    Unknown,
    Wanted,
)


class Rig:
    """A router that has settled, and what it wants done."""

    def __init__(self, start=1, settled=True, **policy):
        limits = policy.pop("limits", Limits(context=100_000, pool=100_000))
        self.router = Router(start, RouterPolicy(limits=limits, **policy), Settings())
        self.now, self.numbers = 0.0, {}
        self.router.step(Start(), 0.0)
        if settled:
            self.now = 3.0

    def __call__(self, event, pause=0.0):
        self.now += pause
        return self.router.step(event, self.now)

    def beats(self, seconds):
        actions, end = [], self.now + seconds
        while self.now < end:
            self.now += 0.5
            actions += self.router.step(Tick(), self.now)
        return actions

    def report(self, worker, role, room=None, holding=(), *, incarnation=1000, life="active", capacity=None, **more):
        self.numbers[worker] = self.numbers.get(worker, 0) + 1
        room = {"prefill": 2.0, "decode": 10_000, "encoder": 1000}[role] if room is None else room
        capacity = room if capacity is None else capacity
        message = Report(worker, role, incarnation, self.numbers[worker], life, tuple(holding), room, capacity, **more)
        return self(message)

    def fleet(self, prefill=1, decode=1):
        for i in range(prefill):
            self.report(f"p{i}", "prefill")
        for i in range(decode):
            self.report(f"d{i}", "decode")

    def submit(self, name="r", prompt=100, epoch=1, tenant="", accepted_by=0, **more):
        options = {"expected_output": 10, "max_tokens": 100} | more
        spec = RequestSpec(tuple(range(prompt)), tenant=tenant, **options)
        return self(Submit(name, epoch, "entry", spec, accepted_by=accepted_by))


def to(actions, kind):
    return [(a.to, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def test_a_request_goes_to_a_pair_of_workers_at_once():
    rig = Rig()
    rig.fleet()
    actions = rig.submit()
    assert only(actions, Accepted) == [Accepted("r", 1, 1)]
    ((d, reserve),) = to(actions, Reserve)
    ((p, assign),) = to(actions, AssignPrefill)
    assert (p, d) == ("p0", "d0") == (reserve.source, assign.target)
    assert (reserve.source_incarnation, assign.target_incarnation) == (1000, 1000)
    assert reserve.need == 100 + 12 + 12  # with growth and drafts


def test_a_worker_pulls_by_its_room():
    rig = Rig()
    rig.fleet()
    rig.report("p0", "prefill", 0.0)
    for i in range(5):
        assert not only(rig.submit(f"r{i}"), AssignPrefill)
    cost = rig.router.policy.cost.prompt(100, 0)
    given = only(rig.report("p0", "prefill", 2.5 * cost), AssignPrefill)
    assert [m.request for m in given] == ["r0", "r1", "r2"]  # until the sum reaches the room
    assert not only(rig.report("p0", "prefill", 2.5 * cost), AssignPrefill)  # what was given counts at once
    holding = [Holding(f"r{i}", 1, "entry", 100) for i in range(3)]
    assert [m.request for m in only(rig.report("p0", "prefill", cost, holding), AssignPrefill)] == ["r3"]


def test_without_room_at_a_decode_worker_nothing_starts():
    rig = Rig()
    rig.fleet(decode=0)
    rig.report("d0", "decode", 150, capacity=150)
    assert only(rig.submit("a"), AssignPrefill)
    assert not only(rig.submit("b"), AssignPrefill)
    assert only(rig.report("d0", "decode", 150, capacity=150), AssignPrefill) == []  # it holds what it was given
    rig(Release("a", 1, True))
    assert [m.request for m in only(rig.report("d0", "decode", 150, capacity=150), AssignPrefill)] == []
    assert rig.router.records["b"].state == "assigned"  # the release made room


def test_a_request_that_grows_beyond_every_worker_starts_all_the_same():
    rig = Rig()
    rig.fleet(decode=0)
    rig.report("d0", "decode", 110)
    (reserve,) = only(rig.submit(expected_output=5000, max_tokens=9000), Reserve)
    assert reserve.need == 110


def test_decode_workers_are_chosen_by_requests_and_by_tokens():
    rig = Rig()
    rig.report("p0", "prefill", 100.0)
    few_long = [Holding(f"x{i}", 1, "entry", 4000, True) for i in range(2)]
    many_short = [Holding(f"y{i}", 1, "entry", 100, True) for i in range(12)]
    rig.report("d0", "decode", 20_000, few_long)
    rig.report("d1", "decode", 20_000, many_short)
    ((short, _),) = to(rig.submit("short", 50), Reserve)
    ((long, _),) = to(rig.submit("long", 6000), Reserve)
    assert (short, long) == ("d1", "d1") or (short, long) == ("d0", "d1")
    assert long == "d1", "a long request goes where few tokens are"


def test_rows_of_a_decode_worker_are_a_limit():
    rig = Rig()
    rig.report("p0", "prefill", 100.0)
    rig.report("d0", "decode", rows=2)
    given = [len(only(rig.submit(f"r{i}"), AssignPrefill)) for i in range(3)]
    assert given == [1, 1, 0]


def test_tenants_share():
    rig = Rig()
    rig.fleet()
    rig.report("p0", "prefill", 0.0)
    for i in range(6):
        rig.submit(f"a{i}", tenant="a")
    rig.submit("b0", tenant="b")
    cost = rig.router.policy.cost.prompt(100, 0)
    order = [m.request for m in only(rig.report("p0", "prefill", 2.5 * cost), AssignPrefill)]
    assert "b0" in order[:2]


def test_what_was_in_before_goes_first():
    rig = Rig()
    rig.fleet()
    rig.report("p0", "prefill", 0.0)
    rig.submit("new")
    rig.submit("again", epoch=2)
    assert only(rig.report("p0", "prefill", 0.001), AssignPrefill)[0].request == "again"


def test_the_side_with_the_shorter_queue_reads():
    rig = Rig(paths=PathSettings(busy=10**6, slow=10**6, gain=1000))
    rig.report("p0", "prefill", node="n0", reading=5000)
    rig.report("d0", "decode", node="n1", reading=100)
    assert only(rig.submit(), AssignPrefill)[0].side == "decode"


def test_repeats_are_known():
    rig = Rig()
    rig.fleet()
    rig.submit()
    actions = rig.submit()
    assert only(actions, Accepted) and not only(actions, AssignPrefill)
    assert only(rig(Wanted("r", 1, "entry")), Accepted)
    assert only(rig(Wanted("other", 1, "entry")), Unknown)
    assert only(rig.submit(epoch=2), AssignPrefill)
    assert rig.submit(epoch=1) == [] and rig(Wanted("r", 1, "entry")) == []


def test_a_higher_epoch_frees_the_workers_of_the_lower():
    rig = Rig()
    rig.fleet()
    rig.submit()
    freed = to(rig.submit(epoch=3), Release)
    assert {name for name, _ in freed} == {"p0", "d0"} and all(m.epoch == 1 and not m.ended for _, m in freed)


def test_what_can_never_run_and_what_would_come_too_late_is_refused():
    rig = Rig(limits=Limits(context=200, pool=300, most_waiting=2))
    (refused,) = only(rig.submit("long", 200), Refused)
    assert refused.status == 400 and "200" in refused.why
    (refused,) = only(rig.submit("early"), Refused)
    assert (refused.status, refused.retry_after) == (429, 30)  # nobody is there
    rig.report("p0", "prefill", 0.0)
    for i in range(2):
        assert only(rig.submit(f"r{i}"), Accepted)
    (refused,) = only(rig.submit("late"), Refused)
    assert refused.status == 429 and refused.retry_after >= 1
    assert only(rig.submit("r0", epoch=2), Accepted), "what is in stays in"
    assert set(rig.router.records) == {"r0", "r1"} and rig.router.refused == {400: 1, 429: 2}


def test_a_router_listens_before_it_gives_out():
    rig = Rig(settled=False)
    rig.fleet()
    actions = rig.submit()
    assert only(actions, Accepted) and not only(actions, AssignPrefill)
    assert only(rig.beats(3.0), AssignPrefill)


def test_after_a_restart_what_is_reported_is_known_and_what_is_not_gets_a_new_epoch():
    rig = Rig(2, settled=False)
    rig.fleet()
    rig.report("d0", "decode", holding=[Holding("runs", 3, "entry", 200, True)])
    rig.submit("runs", epoch=3, accepted_by=1)
    rig.submit("gone", accepted_by=1)
    rig.submit("fresh")
    actions = rig.beats(3.0)
    assert {m.request for m in only(actions, AssignPrefill)} == {"fresh"}
    assert [m.request for m in only(actions, Lost)] == ["gone"]
    assert rig.router.records["runs"].state == "decoding" and rig.router.records["runs"].decode == ("d0", 1000)
    assert only(rig.submit("later", accepted_by=1), Lost)


def test_reports_out_of_order_say_nothing():
    rig = Rig()
    rig.fleet()
    old = Report("d0", "decode", 1000, 1, "active", (Holding("x", 1, "entry", 5, True),), 0.0, 1.0)
    rig.report("d0", "decode")
    assert rig(old) == [] and "x" not in rig.router.records
    assert only(rig.report("d0", "decode"), ReportAck)


def test_a_new_life_of_a_worker_has_nothing_of_the_old():
    rig = Rig()
    rig.fleet()
    rig.submit()
    rig.report("d0", "decode", holding=[Holding("r", 1, "entry", 100, True)])
    actions = rig.report("d0", "decode", incarnation=2000)
    assert [m.epoch for m in only(actions, Lost)] == [1]
    assert rig.report("d0", "decode", incarnation=1000) == []


def test_a_silent_worker_is_dead():
    rig = Rig()
    rig.fleet(prefill=2)
    rig.submit()
    rig.report("d0", "decode", holding=[Holding("r", 1, "entry", 100)])
    lost, sent = [], []
    for _ in range(10):
        rig.report("p1", "prefill")
        rig.report("d0", "decode", holding=[Holding("r", 1, "entry", 100)])
        actions = rig.beats(0.5)
        lost += only(actions, Lost)
        sent += to(actions, SourceGone)
    assert set(rig.router.fleet.views) == {"p1", "d0"}
    assert [(name, m.source) for name, m in sent] == [("d0", "p0")] and not lost  # its target knows what it has


def test_a_worker_that_leaves_is_forgotten():
    rig = Rig()
    rig.fleet()
    rig(Gone("p0", "prefill", 999))
    assert "p0" in rig.router.fleet.views
    rig(Gone("p0", "prefill", 1000))
    assert "p0" not in rig.router.fleet.views and "p0" not in rig.router.waiting.bins.engines


@pytest.mark.parametrize("silent", [False, True])
def test_only_a_worker_whose_end_is_known_is_lost_for_certain(silent):
    rig = Rig()
    rig.fleet(decode=2)
    ((worker, _),) = to(rig.submit(), Reserve)
    others = [("p0", "prefill"), *((name, "decode") for name in ("d0", "d1") if name != worker)]
    actions = [] if silent else rig(Gone(worker, "decode", 1000))
    while not only(actions, Lost):
        actions = [action for name, role in others for action in rig.report(name, role)] + rig.beats(0.5)
    (lost,) = only(actions, Lost)
    assert lost.certain is not silent and worker in lost.why
    assert only(rig.submit(), Lost)[0] == lost, "repeated as it was"


def test_draining_workers_get_nothing():
    rig = Rig()
    rig.fleet()
    rig.report("d0", "decode", life="draining")
    assert not only(rig.submit(), AssignPrefill)
    assert only(rig.report("d1", "decode"), AssignPrefill)


def test_what_no_worker_reports_is_lost_and_stays_so_until_its_entry_goes_on():
    rig = Rig()
    rig.fleet()
    rig.submit()
    lost = []
    for _ in range(12):
        rig.report("p0", "prefill")
        rig.report("d0", "decode")
        rig(Wanted("r", 1, "entry"))
        lost += only(rig.beats(0.5), Lost)
    assert lost and rig.router.records["r"].state == "lost"
    assert only(rig(Wanted("r", 1, "entry")), Lost)
    freed = to(rig.report("p0", "prefill", holding=[Holding("r", 1, "entry", 100)]), Release)
    assert [name for name, _ in freed] == ["p0"]
    assert only(rig.submit(epoch=2), Accepted)


def test_assignments_are_repeated_until_they_are_reported():
    rig = Rig()
    rig.fleet()
    rig.submit()
    rig.report("p0", "prefill", holding=[Holding("r", 1, "entry", 100)])
    actions = rig.beats(1.0)
    assert not only(actions, AssignPrefill) and only(actions, Reserve)


def test_without_a_word_of_its_entry_a_request_is_freed():
    rig = Rig()
    rig.fleet(decode=0)
    rig.submit()
    rig.beats(8.0)
    assert not rig.router.records and not len(rig.router.waiting)


def test_what_was_released_stays_so():
    rig = Rig()
    rig.fleet()
    rig.submit()
    actions = rig(Release("r", 1, True, 5, "entry"))
    assert only(actions, Released) == [Released("r", 1)]
    assert {name for name, _ in to(actions, Release)} == {"p0", "d0"}
    assert rig.submit() == [] and rig.submit(epoch=2) == []
    freed = to(rig.report("d0", "decode", holding=[Holding("r", 1, "entry", 100)]), Release)
    assert [name for name, _ in freed] == ["d0"]
    assert only(rig(Release("never seen", 1, True, 0, "entry")), Released)


def test_a_second_worker_with_the_same_epoch_is_freed():
    rig = Rig()
    rig.fleet(prefill=2)
    ((name, _),) = to(rig.submit(), AssignPrefill)
    other = "p1" if name == "p0" else "p0"
    freed = to(rig.report(other, "prefill", holding=[Holding("r", 1, "entry", 100)]), Release)
    assert [who for who, _ in freed] == [other]


def test_a_migrated_request_is_known_by_its_higher_epoch():
    rig = Rig()
    rig.fleet(decode=2)
    rig.submit()
    rig.report("d1", "decode", holding=[Holding("r", 2, "entry", 100, True)])
    record = rig.router.records["r"]
    assert (record.epoch, record.state, record.decode) == (2, "decoding", ("d1", 1000))
    assert to(rig.report("d0", "decode", holding=[Holding("r", 1, "entry", 100, True)]), Release)[0][0] == "d0"


def moving(rig, number=1):
    spec = RequestSpec(tuple(range(100)), 100, expected_output=10)
    return MoveWanted("r", 1, "d0", 1000, "entry", spec, (1, 2), number)


def test_a_place_for_what_moves():
    rig = Rig()
    rig.fleet(decode=3)
    held = [Holding("r", 1, "entry", 100, True)]
    rig.report("d0", "decode", holding=held, life="draining")
    actions = rig(moving(rig))
    ((_, answer),) = to(actions, MoveTo)
    ((target, reserve),) = to(actions, Reserve)
    assert answer.target == target in ("d1", "d2") and reserve.moving and reserve.source == "d0"
    again = rig(moving(rig))
    assert to(again, MoveTo)[0][1].target == target and not only(again, Reserve)
    actions = rig(moving(rig, 2))  # the first target did not work out
    assert to(actions, MoveTo)[0][1].target not in ("d0", target)
    assert to(actions, Release)[0][0] == target
    for name in ("d1", "d2"):
        rig.report(name, "decode", 0)
    assert to(rig(moving(rig, 3)), MoveTo)[0][1].target == ""


def test_only_the_worker_that_decodes_may_move_a_request():
    rig = Rig()
    rig.fleet(decode=2)
    rig.submit()
    rig.report("d0", "decode", holding=[Holding("r", 2, "entry", 100, True)])
    actions = rig(moving(rig))
    assert not only(actions, MoveTo) and to(actions, Release)[0][0] == "d0"


def test_images_go_first_to_the_encoder_with_the_fewest_patches():
    rig = Rig()
    rig.fleet()
    rig.report("e0", "encoder")
    rig.report("e1", "encoder")
    images = (image("x", 300), image("y", 100), image("z", 100), image("x", 300))
    actions = rig.submit(images=images)
    asked = [(name, m.image.digest) for name, m in to(actions, AssignImage)]
    assert asked == [("e0", "x"), ("e1", "y"), ("e1", "z")] and not only(actions, AssignPrefill)
    assert only(rig.submit("text"), AssignPrefill), "text never waits for images"
    rig(ImageReady("r", 1, "x", "e0", 1000))
    rig(ImageReady("r", 1, "y", "e1", 999))  # of another life
    assert not only(rig(ImageReady("r", 1, "z", "e1", 1000)), AssignPrefill)
    (assign,) = only(rig(ImageReady("r", 1, "y", "e1", 1000)), AssignPrefill)
    assert {(e.digest, e.worker) for e in assign.embeddings} == {("x", "e0"), ("y", "e1"), ("z", "e1")}
    assert not any(rig.router.images._encoders.work.values())


def test_images_of_a_dead_encoder_go_to_another():
    rig = Rig()
    rig.fleet()
    rig.report("e0", "encoder")
    rig.submit(images=(image("x"),))
    rig(Gone("e0", "encoder", 1000))
    assert not rig.router.images._encoders.work
    rig.report("e1", "encoder")
    asked = to(rig.beats(0.5), AssignImage)
    assert asked and asked[0][0] == "e1"


def test_loads_are_told_to_the_scaler():
    rig = Rig(load=2.0)
    rig.fleet(decode=2)
    rig.report("d1", "decode", life="draining")
    rig.submit()
    reports = []
    for _ in range(6):
        rig.report("p0", "prefill", 0.5, capacity=2.0)
        rig.report("d0", "decode", 2500, [Holding("r", 1, "entry", 7500, True)], capacity=10_000)
        reports += only(rig.beats(0.5), LoadReport)
    loads = {load.role: load for load in reports[0].roles}
    assert loads["decode"].workers == ("d0",) and loads["decode"].draining == ("d1",)
    assert loads["decode"].use == pytest.approx(0.75) and loads["decode"].held == 7500
    assert loads["prefill"].use == pytest.approx(0.75, abs=0.01) and loads["prefill"].arrived == 100
    assert loads["encoder"].workers == () and loads["encoder"].use == 1.0
    assert [r.number for r in reports] == list(range(1, len(reports) + 1))
