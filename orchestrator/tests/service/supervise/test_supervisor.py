from __future__ import annotations

import json

import pytest
from supervise_kit import Bench

from orchestrator.roles.messages import Gone


def test_starts_every_worker_once_and_is_ready_when_each_role_is_up():
    bench = Bench(prefill=2, decode=2, encoder=1)
    names = ["router", "encoder-0", "prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert [handle.spec.name for handle in bench.launcher.started] == names
    assert all(handle.spec.life == 1 for handle in bench.launcher.started)
    for name in ("router", "encoder-0", "prefill-1", "decode-0"):
        assert not bench.supervisor.ready
        bench.hello(name)
    assert bench.supervisor.ready


def test_book_has_all_that_are_up_and_grows_in_versions():
    bench = Bench()
    front = {"supervisor": "tcp://front", "scaler": "tcp://front", "entry": "tcp://front"}
    assert bench.books == [front]
    bench.hello("router", book=0)
    bench.hello("prefill-0", book=0)
    book = bench.supervisor.book
    assert book.version == 3
    assert book.addresses == bench.books[-1] == {**front, "router": "tcp://router/1", "prefill-0": "tcp://prefill-0/1"}
    assert bench.books_to("router")[-1] == book == bench.books_to("prefill-0")[-1]
    before = len(bench.sent)
    bench.hello("router")
    assert len(bench.sent) == before  # it has it
    bench.hello("router", book=2)
    assert bench.sent[-1] == ("router", book)  # it has missed one


def test_next_life_starts_at_once_and_the_dead_one_is_out_of_the_book():
    bench = Bench().all_up()
    bench.handle("decode-0").end = "signal 9 (SIGKILL)"
    bench.tick(0.1)
    assert "decode-0" not in bench.supervisor.book.addresses
    bench.tick(0.1)
    assert bench.lives("decode-0") == [1, 2]
    recovery = bench.supervisor.recoveries[-1]
    assert (recovery.name, recovery.life, recovery.up) == ("decode-0", 2, 0.0) and "signal 9" in recovery.why
    bench.tick(3)
    bench.hello("decode-0")
    assert recovery.up - recovery.noticed == pytest.approx(3.1, abs=0.15)
    assert bench.supervisor.book.addresses["decode-0"] == "tcp://decode-0/2"
    assert bench.member("decode-0").restarts == 1


@pytest.mark.parametrize("name", ["decode-0", "router"])
def test_router_is_told_at_once_who_has_died(name):
    bench = Bench().all_up()
    bench.hello(name, incarnation=1003)
    bench.handle(name).end = "signal 9"
    bench.tick(0.1)
    told = [Gone("decode-0", "decode", 1003)] if name == "decode-0" else []
    assert bench.said("router", Gone) == told


def test_router_never_waits_long_for_its_next_life():
    bench = Bench().all_up()
    for life in range(1, 8):
        bench.hello("router")
        bench.handle("router").end = "signal 9"
        bench.tick(2.3)
        assert bench.lives("router")[-1] == life + 1


def test_words_of_an_earlier_life_mean_nothing():
    bench = Bench().all_up()
    bench.handle("decode-0").end = "exit 1"
    bench.tick(0.2)
    bench.hello("decode-0", life=1)
    assert bench.member("decode-0").state == "starting"
    assert "decode-0" not in bench.supervisor.book.addresses
    assert bench.supervisor.counts["hello of another life"] == 1


def test_starts_slow_down_while_they_fail_and_not_any_more_after_a_good_life():
    bench = Bench().all_up()
    waits = []
    for _ in range(6):
        bench.handle("decode-0").end = "exit 1"
        bench.tick(0.1)
        began, lives = bench.now, len(bench.lives("decode-0"))
        while len(bench.lives("decode-0")) == lives:
            bench.tick(0.1)
        waits.append(bench.now - began)
    assert waits == pytest.approx([0.1, 0.5, 1.0, 2.0, 4.0, 8.0], abs=0.11)
    bench.hello("decode-0")
    bench.tick(70)
    bench.handle("decode-0").end = "exit 1"
    bench.tick(0.2)
    assert bench.lives("decode-0")[-1] == 8


def test_more_ends_within_an_hour_than_allowed_is_failed_and_only_its_role_is_lost():
    bench = Bench(prefill=2, restarts=2).all_up()
    for _ in range(3):
        bench.handle("prefill-0").end = "exit 1"
        bench.tick(5)
    assert bench.member("prefill-0").state == "failed" and bench.lives("prefill-0") == [1, 2, 3]
    assert bench.supervisor.trouble is None and bench.supervisor.ready  # prefill-1 goes on
    for _ in range(3):
        bench.handle("prefill-1").end = "exit 1"
        bench.tick(5)
    assert "prefill" in bench.supervisor.trouble and "exit 1" in bench.supervisor.trouble
    bench.tick(100)
    assert bench.lives("prefill-1") == [1, 2, 3]


def test_ends_of_more_than_an_hour_ago_do_not_count():
    bench = Bench(restarts=1, silent=1e9).all_up()
    for _ in range(3):
        bench.handle("decode-0").end = "exit 1"
        bench.supervisor.tick(bench.now)
        bench.supervisor.tick(bench.now)
        bench.hello("decode-0")
        bench.now += 3700
    assert bench.member("decode-0").state == "up"


def test_silent_worker_is_ended_and_replaced():
    bench = Bench(silent=3.0).all_up()
    bench.tick(2.8, talk=False)
    assert not any(handle.kills for handle in bench.launcher.started)
    for name in ("router", "prefill-0", "decode-0"):
        bench.hello(name)
    bench.tick(0.5, talk=False)
    assert bench.handle("decode-1").spec.life == 2
    assert "silent" in bench.member("decode-1").last_exit
    assert bench.lives("decode-0") == [1]


def test_nobody_is_late_while_the_front_itself_did_not_run():
    bench = Bench(silent=3.0).all_up()
    bench.now += 50
    bench.tick(0.1, talk=False)
    bench.tick(1, talk=False)
    assert not any(handle.kills for handle in bench.launcher.started)


def test_stalled_worker_is_ended_however_much_it_talks():
    bench = Bench(stalled=20.0).all_up()
    bench.hello("decode-1", waiting=19.0)
    bench.tick(0.1)
    assert not bench.handle("decode-1").kills
    bench.hello("decode-1", waiting=21.0)
    assert bench.handle("decode-1").kills == 1
    bench.tick(0.2)
    assert bench.lives("decode-1") == [1, 2] and "stalled" in bench.member("decode-1").last_exit


def test_start_that_takes_too_long_is_ended():
    bench = Bench(loading=30.0)
    for name in ("router", "prefill-0", "decode-0"):
        bench.hello(name)
    bench.tick(29.5)
    assert bench.lives("decode-1") == [1]
    bench.tick(1)
    assert bench.lives("decode-1") == [1, 2] and "not up after 30 s" in bench.member("decode-1").last_exit


def test_worker_whose_end_cannot_be_confirmed_is_replaced_regardless():
    bench = Bench(silent=3.0).all_up()
    bench.handle("decode-1").stuck = True  # its node is gone, say
    for _ in range(10):
        for name in ("router", "prefill-0", "decode-0"):
            bench.hello(name)
        bench.tick(1, talk=False)
    assert bench.lives("decode-1") == [1, 2] and "not confirmed" in bench.member("decode-1").last_exit
    assert bench.said("router", Gone) == [], "it may still hold requests"


def test_start_that_fails_at_once_is_tried_again():
    bench = Bench().all_up()
    bench.launcher.refuses = True
    bench.handle("decode-0").end = "exit 1"
    bench.tick(0.3)
    assert "no more processes" in bench.member("decode-0").last_exit
    bench.launcher.refuses = False
    bench.tick(1)
    assert bench.member("decode-0").handle is not None


def test_broken_start_is_known_by_lives_that_never_came_up_and_at_once_by_a_wrong_config():
    bench = Bench()
    for _ in range(3):
        assert bench.supervisor.broken_start is None
        bench.handle("prefill-0").end = "exit 1"
        bench.tick(3)
    broken = bench.supervisor.broken_start
    assert broken.name == "prefill-0" and broken.last_words == "last words of prefill-0"
    bench = Bench()
    bench.handle("decode-0").end = "exit 2"
    bench.tick(0.1)
    assert bench.supervisor.broken_start.name == "decode-0"


def test_drain_starts_another_name_at_once_and_ends_with_the_exit():
    bench = Bench().all_up()
    assert bench.supervisor.drain("decode-1", bench.now) == "decode-2"
    bench.tick(0.1)
    assert bench.member("decode-1").state == "draining" and bench.lives("decode-2") == [1]
    assert bench.leaves("decode-1")[0].grace == 60.0 and bench.leaves("decode-1")[0].life == 1
    assert "decode-1" in bench.supervisor.book.addresses  # it still moves what it holds
    bench.tick(5)
    assert len(bench.leaves("decode-1")) == 3  # it may have got lost
    bench.supervisor.receive(Gone("decode-1", "decode", 1000), bench.now)
    bench.handle("decode-1").end = "exit 0"
    bench.tick(1)
    assert "decode-1" not in bench.supervisor.members and bench.lives("decode-1") == [1]
    assert [member.name for member in bench.supervisor.gone] == ["decode-1"]
    assert "decode-1" not in bench.supervisor.book.addresses
    bench.hello("decode-2")
    assert bench.supervisor.drain("decode-2", bench.now) == "decode-3"


def test_drained_worker_that_is_killed_or_never_leaves_is_gone_too():
    bench = Bench(grace=10.0).all_up()
    bench.supervisor.drain("decode-1", bench.now)
    bench.handle("decode-1").end = "signal 9 (SIGKILL)"
    bench.tick(5)
    assert bench.lives("decode-1") == [1] and not bench.supervisor.recoveries
    bench.supervisor.drain("decode-0", bench.now)
    bench.tick(99)
    assert bench.handle("decode-0").kills == 0
    bench.tick(3)
    assert bench.handle("decode-0").kills == 1 and "decode-0" not in bench.supervisor.members


def test_drain_is_refused_for_who_is_not_there_or_not_up():
    bench = Bench().all_up()
    with pytest.raises(KeyError):
        bench.supervisor.drain("decode-7", bench.now)
    bench.supervisor.drain("decode-1", bench.now)
    for name in ("decode-1", "decode-2"):
        with pytest.raises(ValueError, match="allowed is one that is up"):
            bench.supervisor.drain(name, bench.now)


def test_router_that_is_drained_starts_anew_under_its_name():
    bench = Bench().all_up()
    assert bench.supervisor.drain("router", bench.now) == "router"
    bench.tick(0.3)
    assert bench.lives("router") == [1, 2]


def test_worker_that_leaves_by_a_signal_of_somebody_else_is_replaced():
    bench = Bench().all_up()
    bench.supervisor.receive(Gone("decode-0", "decode", 1000), bench.now)
    assert bench.member("decode-0").state == "draining"
    bench.handle("decode-0").end = "exit 0"
    bench.tick(0.3)
    assert bench.lives("decode-0") == [1, 2]


def test_end_lets_all_leave_and_starts_nobody():
    bench = Bench().all_up()
    bench.handle("decode-0").end = "exit 1"
    bench.tick(0.1)
    bench.supervisor.end(bench.now, 0.0)
    assert [leave.grace for leave in bench.leaves("decode-1")] == [0.0]
    assert not bench.supervisor.ended
    for name in ("router", "prefill-0", "decode-1"):
        bench.handle(name).end = "exit 0"
    bench.tick(10)
    assert bench.supervisor.ended and bench.lives("decode-0") == [1] and not bench.supervisor.forced


def test_end_at_once_kills():
    bench = Bench().all_up()
    bench.supervisor.end(bench.now, -1.0)
    bench.tick(0.1)
    assert all(handle.kills == 1 for handle in bench.launcher.started)
    assert bench.supervisor.ended and bench.supervisor.forced == 4


def test_status_can_be_shown_as_json():
    bench = Bench().all_up()
    bench.hello("decode-0", steps=7, held=2, memory=5 << 20, waiting=0.25, numbers={"rows": 2.0})
    bench.handle("decode-1").end = "exit 1"
    bench.tick(2)
    shown = json.loads(json.dumps(bench.supervisor.status(bench.now)))
    workers = {worker["name"]: worker for worker in shown["workers"]}
    assert shown["version"] == 1 and set(workers) == {"router", "prefill-0", "decode-0", "decode-1"}
    first = workers["decode-0"]
    assert (first["state"], first["life"], first["pid"]) == ("up", 1, bench.handle("decode-0").pid)
    assert workers["decode-1"]["restarts"] == 1 and workers["decode-1"]["last_exit"] == "exit 1"
    assert workers["decode-1"]["state"] == "starting" and shown["recoveries"][0]["name"] == "decode-1"
