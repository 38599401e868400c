"""Each rule is needed: with it off, something breaks that these tests see; with all on, nothing does."""

from dataclasses import fields

import pytest
from roles_kit import Service

from orchestrator.balance.admission import Limits
from orchestrator.roles import RouterPolicy, Rules
from orchestrator.roles.messages import ClientRequest, Deliver, Drain, Piece, Report, Reserve, Submit, Tokens


def without(rule):
    return Rules(**({rule: False} if rule else {}))


def late_epochs(rule):
    """A decode worker is cut off, its requests go on elsewhere, slowly; then the first is heard again."""
    service = Service(decode=2, rules=without(rule))
    service.request(most=4000, seed=1000)
    service.run(0.2)
    entry = service.core("entry")
    first = entry.live["r"].worker
    service.engine("decode-1" if first == "decode-0" else "decode-0").delay = 0.05
    service.fate = lambda source, to, message: [] if first in (source, to) else [0.001]
    service.run(5)
    assert entry.live["r"].epoch == 2
    delivered = []
    step = entry.step

    def watched(event, now):
        actions = step(event, now)
        delivered.extend(a.epoch for a in actions if isinstance(a, Deliver))
        return actions

    entry.step = watched
    service.fate = lambda source, to, message: [0.001]
    service.run(1)
    assert set(delivered) == {2}


def repeated_tokens(rule):
    service = Service(rules=without(rule), fate=lambda s, to, m: [0.001, 0.002] if isinstance(m, Tokens) else [0.001])
    service.request(most=12)
    service.finish(10)
    service.check()


def one_request(rule):
    service = Service(rules=without(rule))
    service.request(most=12)
    service.finish(200)
    service.check()
    assert service.answers["r"].end.outcome == "finished"


def broken_part(rule):
    service = Service(rules=without(rule))
    push, seen = service._push, []

    def tamper(at, name, life, event):
        if isinstance(event, Piece) and not seen:
            seen.append(event)
            event = Piece(event.request, event.epoch, event.source_incarnation, event.part, b"foreign")
        push(at, name, life, event)

    service._push = tamper
    service.request(most=12)
    service.finish(10)
    service.check()
    assert seen


def cancelled(rule):
    service = Service(rules=without(rule))
    service.request(most=4000, seed=1000)
    service.run(0.2)
    service.cancel()
    service.run(1.0)
    assert service.holders() == set()


def refused(rule):
    service = Service(rules=without(rule))
    service.request(prompt=5000)
    service.run(1)
    end = service.answers["r"].end
    assert end is not None and (end.outcome, end.status) == ("rejected", 400)


def replayed(rule):
    service = Service(decode=2, rules=without(rule))
    service.request(most=100, seed=1000)
    service.run(0.2)
    service.crash(service.core("entry").live["r"].worker)
    service.finish(60)
    service.check()


def dead_worker(rule):
    service = Service(decode=2, prefill=2, rules=without(rule))
    service.crash("prefill-0")
    service.run(8)
    for number in range(4):
        service.request(f"r{number}", seed=number)
    service.finish(10)


def drained(rule):
    service = Service(decode=2, rules=without(rule))
    service.request(most=2000, seed=1000)
    service.run(0.2)
    worker = service.core("entry").live["r"].worker
    core = service.core(worker)
    service.give(worker, Drain(worker, core.incarnation, 1.0))
    service.run(10)
    assert core.gone and not core.rows
    assert service.engine("prefill-0").computed == 20


def client_retries(rule):
    service = Service(rules=without(rule))
    spec = service.request(most=500, seed=1000)
    service.run(0.5)
    service.give("entry", ClientRequest("r", spec))
    service.finish(20)
    service.check()


def other_life(rule):
    """A report of an earlier life of a worker comes when the next one works already."""
    late = []

    def fate(source, to, message):
        if isinstance(message, Report) and source == "decode-0" and service_up and not late:
            late.append(message)
            return [1.0]
        return [0.001]

    service_up = []
    service = Service(rules=without(rule), fate=fate)
    service_up.append(True)
    service.run(0.5)
    service.crash("decode-0")
    service.start("decode-0")
    service.request(most=1000, seed=1000)
    service.run(3)
    assert late and late[0].incarnation < service.core("decode-0").incarnation
    assert service.core("entry").live["r"].epoch == 1


def late_submit(rule):
    """A repeated `Submit` comes when the request has ended long since."""
    service = Service(rules=without(rule), fate=lambda s, to, m: [0.001, 3.0] if isinstance(m, Submit) else [0.001])
    service.request(most=5)
    service.finish(2)
    service.run(2)
    given = [message for _, _, _, message in service.sent if isinstance(message, Reserve)]
    assert len(given) == 1
    service.run(3)
    assert [message for _, _, _, message in service.sent if isinstance(message, Reserve)] == given


SCENES = {
    "check_epoch": late_epochs,
    "dedup_by_index": repeated_tokens,
    "hold_until_taken": one_request,
    "check_parts": broken_part,
    "forward_cancel": cancelled,
    "tell_refusal": refused,
    "replay_whole_log": replayed,
    "drop_dead": dead_worker,
    "drain_waits": drained,
    "know_retries": client_retries,
    "check_incarnation": other_life,
    "keep_tombstones": late_submit,
}


def test_every_rule_has_a_scene():
    assert set(SCENES) == {field.name for field in fields(Rules)}
    assert all(getattr(Rules(), name) for name in SCENES)


@pytest.mark.parametrize("rule", SCENES)
def test_scene_goes_well_with_all_rules(rule):
    SCENES[rule]("")


@pytest.mark.parametrize("rule", SCENES)
def test_scene_goes_wrong_without_its_rule(rule):
    with pytest.raises(AssertionError):
        SCENES[rule](rule)


def test_overload_is_refused_with_a_time_to_come_again():
    policy = RouterPolicy(limits=Limits(context=4096, pool=4096, most_waiting=3))
    service = Service(policy=policy, tokens=400)
    for number in range(12):
        service.request(f"r{number}", most=200, seed=1000 + number)
    service.finish(60)
    service.check()
    ends = [a.end for a in service.answers.values()]
    rejected = [end for end in ends if end.outcome == "rejected"]
    assert rejected and all(end.status == 429 and end.retry_after >= 1 and end.tokens == 0 for end in rejected)
    assert sum(end.outcome == "finished" for end in ends) == 12 - len(rejected) >= 3
    entry = service.core("entry")
    assert entry.outcomes["rejected"] == service.core("router").refused[429] == len(rejected)


def test_accepted_requests_are_never_refused_afterwards():
    policy = RouterPolicy(limits=Limits(context=4096, pool=4096, most_waiting=2))
    service = Service(policy=policy, decode=1)
    for number in range(3):
        service.request(f"r{number}", most=300, seed=1000 + number)
        service.run(0.1)
    service.crash("decode-0")
    service.run(1)
    service.start("decode-0")
    service.finish(60)
    service.check()
    assert all(a.end.outcome == "finished" for a in service.answers.values())
