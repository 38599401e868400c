"""The scaler: wants from loads, drains until they are gone, machines that change their role."""

import pytest
from roles_kit import only

from orchestrator.balance.scaling import ScalePolicy
from orchestrator.roles import Scaler, ScalerOptions, Settings
from orchestrator.roles.messages import (
    CancelStart,
    Drain,
    Gone,
    LoadReport,
    RoleLoad,
    Start,
    StartWorker,
    Tick,
    WorkerUp,
)

QUICK = ScalePolicy(least=1, most=10, up=1.0, up_periods=1, down_periods=1, cool=1)


class Rig:
    def __init__(self, **options):
        policies = {"encoder": ScalePolicy(least=0), "prefill": QUICK, "decode": QUICK}
        given = {"tokens_s": 1000, "patches_s": 1000, "rows": 10, "pool": 10_000, "policies": policies, "period": 10.0}
        self.scaler = Scaler(ScalerOptions(**{**given, **options}), Settings())
        self.scaler.step(Start(), 0.0)
        self.now, self.number = 0.0, 0

    def load(self, role, workers, use=0.5, draining=(), arrived=0, backlog=0, requests=0, held=0):
        names = tuple(f"{role}{i}" for i in range(workers) if f"{role}{i}" not in draining)
        return RoleLoad(role, names, (1000,) * len(names), tuple(draining), use, arrived, backlog, requests, held)

    def run(self, seconds, *loads):
        """Let time pass, the same load being reported each five seconds."""
        actions, end = [], self.now + seconds
        while self.now < end:
            self.now += 0.5
            if loads and self.now % 5 == 0:
                self.number += 1
                roles = {load.role: load for load in (self.load("encoder", 0), *loads)}
                actions += self.scaler.step(LoadReport(1, self.number, tuple(roles.values())), self.now)
            actions += self.scaler.step(Tick(), self.now)
        return actions


def test_grows_by_missed_tokens_and_requests_in_flight():
    rig = Rig()
    busy = rig.load("prefill", 2, 1.0, arrived=20_000, backlog=30_000), rig.load("decode", 2, 0.9, requests=35)
    started = [a.role for a in only(rig.run(10, *busy), StartWorker)]
    assert started.count("decode") == 2 and started.count("prefill") >= 2
    more = [a.role for a in only(rig.run(10, *busy), StartWorker)]
    assert "decode" not in more, "what is on its way counts"


def test_a_start_that_is_not_needed_any_more_is_given_up():
    rig = Rig()
    rig.run(10, rig.load("prefill", 1), rig.load("decode", 2, 0.9, requests=35))
    calm = rig.load("prefill", 1), rig.load("decode", 2, 0.5, requests=20)
    assert [a.role for a in only(rig.run(10, *calm), CancelStart)] == ["decode", "decode"]
    rig.scaler.step(WorkerUp("decode", failed=True), rig.now)
    rig.scaler.step(WorkerUp("decode"), rig.now)
    assert rig.scaler._scalers["decode"].pending == 0


def test_drains_one_until_it_is_gone():
    rig = Rig()
    calm = rig.load("prefill", 1), rig.load("decode", 4, 0.2, requests=5)
    actions = rig.run(10, *calm)
    assert {d.worker for d in only(actions, Drain)} == {"decode3"}
    leaving = rig.load("prefill", 1), rig.load("decode", 4, 0.2, draining=("decode3",), requests=5)
    assert {d.worker for d in only(rig.run(9, *leaving), Drain)} == {"decode3"}  # repeated
    rig.scaler.step(Gone("decode3", "decode", 999), rig.now)
    assert "decode3" in rig.scaler.leaving  # of an earlier life
    rig.scaler.step(Gone("decode3", "decode", 1000), rig.now)
    assert "decode3" not in rig.scaler.leaving


def test_a_drained_worker_that_died_is_gone_too():
    rig = Rig()
    rig.run(10, rig.load("prefill", 1), rig.load("decode", 4, 0.2, requests=5))
    assert "decode3" in rig.scaler.leaving
    rig.run(5, rig.load("prefill", 1), rig.load("decode", 3, 0.6, requests=25))
    assert "decode3" not in rig.scaler.leaving


def test_nothing_goes_while_it_is_used():
    rig = Rig()
    assert not only(rig.run(40, rig.load("prefill", 1), rig.load("decode", 4, 0.81, requests=5)), Drain)
    assert not only(rig.run(40, rig.load("prefill", 1), rig.load("decode", 2, 0.5, requests=5)), Drain), "0.5 * 2 / 1"


def test_without_reports_it_holds():
    rig = Rig(stale=4.0)
    rig.run(5, rig.load("prefill", 1), rig.load("decode", 4, 0.2, requests=5))
    assert not only(rig.run(60), Drain)


def test_a_machine_that_one_role_gives_up_becomes_another_role():
    rig = Rig()
    mixed = rig.load("prefill", 2, 1.0, arrived=5000, backlog=14_000), rig.load("decode", 4, 0.2, requests=5)
    actions = rig.run(10, *mixed)
    (drain,) = {d.worker for d in only(actions, Drain)}
    assert drain == "decode3" and not only(actions, StartWorker)
    started = only(rig.scaler.step(Gone("decode3", "decode", 1000), rig.now), StartWorker)
    assert [s.role for s in started] == ["prefill"]


def test_spares_are_taken_first():
    rig = Rig(spares=1)
    started = only(rig.run(10, rig.load("prefill", 1), rig.load("decode", 2, 0.9, requests=35)), StartWorker)
    assert [s.spare for s in started] == [True, False] and rig.scaler.spares == 0


def test_old_reports_say_nothing():
    rig = Rig()
    rig.run(5, rig.load("prefill", 1), rig.load("decode", 2, 0.5, requests=15))
    rig.scaler.step(LoadReport(1, 0, (rig.load("decode", 0, 1.0),)), rig.now)
    assert rig.scaler._loads["decode"].workers


@pytest.mark.parametrize("name", ["tokens_s", "rows", "period"])
def test_bad_options_are_named(name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        Rig(**{name: 0})
