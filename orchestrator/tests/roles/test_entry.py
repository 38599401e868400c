"""The entry: one outcome a request, every token once, epochs that only it raises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from roles_kit import only

from orchestrator.roles import Entry, Settings
from orchestrator.roles.messages import (
    Accepted,
    ClientCancel,
    ClientRequest,
    Deliver,
    DeliverEnd,
    DeliverReady,
    Landed,
    Lost,
    Refused,
    Release,
    Released,
    RequestSpec,
    Resume,
    Send,
    Submit,
    Tick,
    Tokens,
    TokensAck,
    Unknown,
    Wake,
    Wanted,
    WorkFailed,
)

SPEC = RequestSpec(tuple(range(10)), 8)


def entry_in(state):
    """An entry whose only request is in a state, at time 1."""
    entry = Entry("entry", Settings())
    entry.step(ClientRequest("r", SPEC), 1.0)
    if state != "submitted":
        entry.step(Accepted("r", 1, 1), 1.0)
    if state == "streaming":
        entry.step(tokens(1, 0, (5, 6)), 1.0)
    if state == "waiting":
        entry.step(Lost("r", 1, "once"), 1.0)
        entry.step(Lost("r", 2, "twice"), 1.0)
    assert entry.live["r"].state == state
    return entry


def tokens(epoch, index, values, worker="d", incarnation=1000, reason=""):
    return Tokens("r", epoch, worker, incarnation, 1, 0, index, tuple(values), reason)


def beats(entry, start, end):
    """All actions of the ticks from `start` to `end`."""
    actions = []
    at = start
    while at <= end:
        actions += entry.step(Tick(), at)
        at += 0.5
    return actions


STATES = ["submitted", "accepted", "streaming", "waiting"]


@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state_ends_once_and_tells_who_may_hold_something(state):
    entry = entry_in(state)
    epoch = entry.live["r"].epoch
    actions = entry.step(ClientCancel("r"), 2.0)
    (end,) = only(actions, DeliverEnd)
    assert (end.outcome, end.tokens) == ("cancelled", 2 if state == "streaming" else 0)
    told = {a.to for a in actions if isinstance(a, Send) and isinstance(a.message, Release)}
    assert told == ({"router", "d"} if state == "streaming" else {"router"})
    assert all(m.ended and m.epoch == epoch for m in only(actions, Release))
    assert only(entry.step(ClientCancel("r"), 2.0), DeliverEnd) == []
    assert len(only(beats(entry, 2.5, 4.0), Release)) >= 3  # until the router has heard it
    entry.step(Released("r", epoch), 4.0)
    assert only(beats(entry, 4.5, 6.0), Release) == []
    beats(entry, 6.5, 70.0)
    assert not any(isinstance(a, Wake) for a in entry.step(Tick(), 71.0)), "nothing is left to watch"


@pytest.mark.parametrize("late", ["tokens", "landed", "failed", "accepted", "lost", "refused", "unknown"])
def test_whatever_comes_late_is_told_that_the_request_has_ended(late):
    entry = entry_in("streaming")
    entry.step(ClientCancel("r"), 2.0)
    message = {
        "tokens": tokens(1, 2, (7,)),
        "landed": Landed("r", 1, "d", 1000, (5, 6)),
        "failed": WorkFailed("r", 1, "d", 1000, "why"),
        "accepted": Accepted("r", 1, 1),
        "lost": Lost("r", 1, "why"),
        "refused": Refused("r", 1, 429, 1, "full"),
        "unknown": Unknown("r", 1),
    }[late]
    actions = entry.step(message, 3.0)
    (release,) = only(actions, Release)
    assert release.ended and release.epoch >= 1
    assert not only(actions, Deliver) and not only(actions, DeliverEnd)


def test_a_clients_retry_is_the_same_request():
    entry = entry_in("streaming")
    assert entry.step(ClientRequest("r", SPEC), 2.0) == []
    entry.step(ClientCancel("r"), 2.0)
    assert only(entry.step(ClientRequest("r", SPEC), 3.0), Submit) == []


def test_tokens_are_taken_once_and_in_order():
    entry = entry_in("accepted")
    actions = entry.step(tokens(1, 0, (5, 6)), 2.0)
    assert [type(a) for a in actions if not isinstance(a, Send | Wake)] == [DeliverReady, Deliver]
    assert only(entry.step(tokens(1, 0, (5, 6)), 2.0), Deliver) == []
    assert only(entry.step(tokens(1, 3, (8,)), 2.0), Deliver) == []  # one is missing
    (deliver,) = only(entry.step(tokens(1, 1, (6, 7, 8)), 2.0), Deliver)
    assert (deliver.index, deliver.tokens) == (2, (7, 8))
    assert entry.live["r"].log == [5, 6, 7, 8]
    assert entry.dropped == {"delivered before": 3, "ahead of the log": 1}


def test_notes_stay_beside_their_tokens():
    entry = entry_in("streaming")
    message = Tokens("r", 1, "d", 1000, 1, 0, 1, (6, 7, 8), notes=(b"6", b"7", b"8"))
    (deliver,) = only(entry.step(message, 2.0), Deliver)
    assert (deliver.index, deliver.tokens, deliver.notes) == (2, (7, 8), (b"7", b"8"))


def test_a_gap_is_answered_with_what_is_there():
    entry = entry_in("streaming")
    (ack,) = only(entry.step(tokens(1, 5, (9,)), 1.01), TokensAck)
    assert ack == TokensAck("r", 1, 2)


def test_no_more_tokens_than_asked_for():
    entry = entry_in("accepted")
    actions = entry.step(tokens(1, 0, range(20)), 2.0)
    assert only(actions, Deliver)[0].tokens == tuple(range(8))
    assert only(actions, DeliverEnd)[0] == DeliverEnd("r", "finished", "length", 8)


def test_an_end_counts_only_behind_all_tokens():
    entry = entry_in("streaming")
    assert only(entry.step(tokens(1, 4, (9,), reason="stop"), 2.0), DeliverEnd) == []
    assert only(entry.step(tokens(1, 2, (7, 8, 9), reason="stop"), 2.0), DeliverEnd)[0].tokens == 5


def test_usage_comes_first_even_without_a_token():
    entry = entry_in("accepted")
    actions = entry.step(tokens(1, 0, (), reason="stop"), 2.0)
    assert [type(a) for a in actions if not isinstance(a, Send | Wake)] == [DeliverReady, DeliverEnd]


@pytest.mark.parametrize(
    "message",
    [tokens(1, 2, (7,), worker="other"), tokens(1, 2, (7,), incarnation=999), tokens(0, 2, (7,)), tokens(2, 2, (7,))],
)
def test_only_the_worker_that_the_epoch_is_bound_to_is_heard(message):
    entry = entry_in("streaming")
    actions = entry.step(message, 2.0)
    assert not only(actions, Deliver)
    (release,) = only(actions, Release)
    assert (release.epoch, release.ended) == (message.epoch, False)


def test_failures_raise_the_epoch_and_carry_the_log():
    entry = entry_in("streaming")
    actions = entry.step(WorkFailed("r", 1, "d", 1000, "its rank died"), 2.0)
    (submit,) = only(actions, Submit)
    assert (submit.epoch, submit.output, submit.accepted_by) == (2, (5, 6), 0)
    assert not only(entry.step(tokens(1, 2, (7,)), 2.0), Deliver)  # too late
    entry.step(Accepted("r", 2, 1), 2.0)
    (deliver,) = only(entry.step(tokens(2, 2, (7,), worker="e"), 2.1), Deliver)
    assert (deliver.index, deliver.epoch) == (2, 2)


def test_failures_in_a_row_end_a_request_and_a_token_starts_the_count_anew():
    entry = entry_in("accepted")
    attempts = entry.settings.attempts
    now, epoch = 2.0, 1
    for number in range(3 * attempts):
        actions = entry.step(Lost("r", epoch, f"number {number}"), now)
        if only(actions, DeliverEnd):
            break
        submits = only(actions, Submit)
        while not submits:
            now += 0.5
            submits = only(entry.step(Tick(), now), Submit)
        epoch = submits[0].epoch
        entry.step(Accepted("r", epoch, 1), now)
        if number == 4:
            entry.step(tokens(epoch, 0, (5,)), now)
            now += 3.0
    assert number == 4 + attempts
    (end,) = only(actions, DeliverEnd)
    assert (end.outcome, end.status) == ("failed", 500) and f"number {number}" in end.reason


def test_a_failure_that_no_retry_helps_ends_it():
    entry = entry_in("accepted")
    (end,) = only(entry.step(WorkFailed("r", 1, "p", 1000, "bad", retry=False), 2.0), DeliverEnd)
    assert (end.outcome, end.reason) == ("failed", "bad")


def test_the_source_of_a_good_transfer_may_fail_without_harm():
    entry = entry_in("streaming")
    actions = entry.step(WorkFailed("r", 1, "p", 1000, "target is silent"), 2.0)
    assert [m.ended for m in only(actions, Release)] == [False] and entry.live["r"].epoch == 1


def test_a_silent_worker_is_replaced():
    entry = entry_in("streaming")
    assert only(beats(entry, 1.5, 4.5), Submit) == []
    (submit,) = only(beats(entry, 5.0, 6.0), Submit)[:1]
    assert submit.epoch == 2


def test_a_router_that_has_lost_a_worker_is_believed_when_the_entry_hears_nothing_either():
    entry = entry_in("streaming")
    assert only(entry.step(Lost("r", 1, "silent"), 1.4), Submit) == []
    entry.step(tokens(1, 2, (7,)), 1.5)  # it lives after all
    assert only(beats(entry, 2.0, 3.0), Submit) == []
    entry.step(Lost("r", 1, "silent"), 2.4)
    assert only(beats(entry, 3.5, 4.5), Submit)[0].epoch == 2


def test_a_worker_whose_life_is_over_is_not_waited_for():
    entry = entry_in("streaming")
    (submit,) = only(entry.step(Lost("r", 1, "d left", certain=True), 1.1), Submit)
    assert (submit.epoch, submit.output) == (2, (5, 6))
    assert not only(entry.step(tokens(1, 2, (7,)), 1.2), Deliver)  # was still under way


def test_times_that_run_out():
    settings = Settings()
    entry = Entry("entry", settings)
    entry.step(ClientRequest("r", SPEC), 0.0)
    (end,) = only(beats(entry, 0.5, settings.admit + 1), DeliverEnd)
    assert (end.outcome, end.status) == ("failed", 503)
    entry = entry_in("accepted")
    actions = []
    for number in range(2 * int(settings.first_token) + 4):
        actions += entry.step(Tick(), 1.5 + number / 2)
        entry.step(Accepted("r", 1, 1), 1.5 + number / 2)
    (end,) = only(actions, DeliverEnd)
    assert end.status == 503 and len(only(actions, Wanted)) > 50
    entry = entry_in("streaming")
    entry.live["r"].heard = settings.request
    (end,) = only(entry.step(Tick(), settings.request + 2), DeliverEnd)
    assert end.status == 504 and end.tokens == 2


def test_refusals_reach_the_client():
    entry = entry_in("submitted")
    (end,) = only(entry.step(Refused("r", 1, 429, 7, "full"), 1.0), DeliverEnd)
    assert (end.outcome, end.status, end.retry_after) == ("rejected", 429, 7)
    entry = entry_in("accepted")
    assert entry.step(Refused("r", 1, 429, 7, "full"), 1.0) == []  # of a router that did not know


def test_a_copy_that_landed_gets_the_epoch_and_the_source_is_freed():
    entry = entry_in("streaming")
    actions = entry.step(Landed("r", 1, "e", 2000, (5, 6, 7)), 2.0)
    assert only(actions, Resume) == [Resume("r", 1, 2, 2000, 2)]
    assert [a.to for a in actions if isinstance(a, Send) and isinstance(a.message, Release)] == ["d"]
    assert only(entry.step(Landed("r", 1, "e", 2000, (5, 6, 7)), 2.0), Resume) == [Resume("r", 1, 2, 2000, 2)]
    assert only(entry.step(Landed("r", 1, "f", 1, (5, 6, 7)), 2.0), Release)  # a second copy
    assert not only(entry.step(tokens(1, 2, (7,)), 2.0), Deliver)  # of the source
    assert only(entry.step(tokens(2, 2, (7,), "e", 2000), 2.0), Deliver)[0].index == 2


@pytest.mark.parametrize("output", [(5,), (5, 9, 7), ()])
def test_a_copy_that_is_behind_the_log_is_freed(output):
    entry = entry_in("streaming")
    actions = entry.step(Landed("r", 1, "e", 2000, output), 2.0)
    assert only(actions, Release) and not only(actions, Resume) and entry.live["r"].epoch == 1


EVENTS = st.one_of(
    st.builds(Accepted, st.just("r"), st.integers(1, 4), st.integers(1, 2)),
    st.builds(Lost, st.just("r"), st.integers(1, 4), st.just("why")),
    st.builds(Unknown, st.just("r"), st.integers(1, 4)),
    st.builds(Refused, st.just("r"), st.integers(1, 4), st.just(429), st.just(1), st.just("full")),
    st.builds(WorkFailed, st.just("r"), st.integers(1, 4), st.sampled_from("de"), st.just(1000), st.just("why")),
    st.builds(
        lambda e, i, n, w, end: tokens(e, i, range(i, i + n), w, reason="stop" if end else ""),
        st.integers(1, 4), st.integers(0, 7), st.integers(0, 4), st.sampled_from("de"), st.sampled_from([0, 0, 0, 1]),
    ),
    st.builds(lambda e, n: Landed("r", e, "e", 1000, tuple(range(n))), st.integers(1, 4), st.integers(0, 8)),
    st.just(ClientRequest("r", SPEC)),
    st.sampled_from([Tick(), Tick(), Tick(), ClientCancel("r")]),
)  # fmt: skip


@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.1, 0.6, 5.0])), max_size=60))
def test_any_order_of_events_gives_each_token_once_and_one_outcome(events):
    entry = Entry("entry", Settings())
    now, log, epochs, ends, ready = 0.0, [], [], 0, 0
    raised = 1
    for event, pause in [(ClientRequest("r", SPEC), 0.0), *events]:
        now += pause
        for action in entry.step(event, now):
            if isinstance(action, Deliver):
                assert action.index == len(log) and ready == 1 and ends == 0
                log += action.tokens
                epochs.append(action.epoch)
                assert action.epoch == raised
            elif isinstance(action, DeliverReady):
                ready += 1
            elif isinstance(action, DeliverEnd):
                ends += 1
                assert action.tokens == len(log)
            elif isinstance(action, Send) and isinstance(action.message, Submit | Resume):
                epoch = action.message.epoch if isinstance(action.message, Submit) else action.message.new_epoch
                assert epoch >= raised
                raised = epoch
    assert ends <= 1 and ready <= 1 and log == list(range(len(log))) and epochs == sorted(epochs)
    assert ends == 1 or "r" in entry.live
    assert entry.received == sum(entry.outcomes.values()) + len(entry.live) == 1


@pytest.mark.parametrize("jump", [0.0, 86.4, 1e6])
def test_a_request_that_came_twice_is_answered_once_whatever_the_clock_did(jump):
    """The copy was under way, or lay unread, while the entry was stopped or its clock was set."""
    entry = entry_in("submitted")
    (end,) = only(entry.step(Refused("r", 1, 429, 30, "full"), 2.0), DeliverEnd)
    assert end.outcome == "rejected"
    for at in (2.5 + jump, 3.0 + jump):
        actions = entry.step(Tick(), at) + entry.step(ClientRequest("r", SPEC), at)
        assert not only(actions, Submit) and not entry.live
    beats(entry, 3.0 + jump, 4.0 + jump + entry.settings.tombstone)
    assert only(entry.step(ClientRequest("r", SPEC), 200.0 + jump), Submit), "it is forgotten in the end"
