"""Paths, encoders, tenants, admission, scaling."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.balance.admission import (
    FairQueue,
    Limits,
    Never,
    Overloaded,
    TokenBucket,
    check_load,
    check_size,
)
from orchestrator.balance.paths import PathSettings, PrefillLoad, balanced_ratio, choose_prefill, choose_side
from orchestrator.balance.scaling import (
    Change,
    Rate,
    ScalePolicy,
    Scaler,
    decode_want,
    encoder_want,
    prefill_want,
    trade,
)
from orchestrator.balance.vision import Encoders, patches


def test_prefill_engine_by_load_and_by_reads():
    settings = PathSettings(busy=100, slow=50)
    loads = [PrefillLoad("a", 10, "n0"), PrefillLoad("b", 20, "n1"), PrefillLoad("c", 101, "n2")]
    assert choose_prefill(loads, {}, settings).name == "a"
    assert choose_prefill(loads, {"n0": 51}, settings).name == "b"
    assert choose_prefill(loads, {"n0": 51, "n1": 51}, settings).name == "a"
    assert choose_prefill(loads[2:], {}, settings) is None
    assert choose_side(10**6, 0, settings) == "decode" and choose_side(1000, 0, settings) == "prefill"


def test_ratio_of_nodes():
    least, most = balanced_ratio(8, 1, 10.0)
    assert least == pytest.approx(1 / 7) and most == pytest.approx(3.5)
    with pytest.raises(ValueError, match="storage"):
        balanced_ratio(8, 4, 10)


def test_images_go_to_the_fewest_patches():
    assert patches(28, 29, 14) == 6
    encoders = Encoders(most=100)
    assert encoders.assign(5) is None
    encoders.add("a")
    encoders.add("b")
    assert [encoders.assign(60), encoders.assign(500), encoders.assign(40), encoders.assign(1)] == ["a", "b", "a", None]
    encoders.done("a", 60)
    encoders.done("gone", 60)
    assert encoders.assign(60) == "a"
    encoders.remove("b")
    assert encoders.assign(1) is None


def test_tenants_share_by_tokens():
    queue: FairQueue[int] = FairQueue()
    for n in range(100):
        queue.push("many", n)
    queue.push("few", 1000)
    queue.push("few", 1001)
    served = []
    while len(queue):
        tenant, _ = queue.pop()
        queue.charge(tenant, missed=100)
        served.append(tenant)
    assert served[:4].count("few") == 2


def test_idleness_saves_nothing_up():
    queue: FairQueue[int] = FairQueue()
    queue.push("late", 0)
    queue.pop()  # known, charged nothing
    for n in range(50):
        queue.push("busy", n)
    for _ in range(40):
        queue.charge(queue.pop()[0], missed=1000)
    for n in range(10):
        queue.push("late", n)
    order = []
    for _ in range(10):
        tenant, _ = queue.pop()
        queue.charge(tenant, missed=1000)
        order.append(tenant)
    assert 4 <= order.count("late") <= 6


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2000), st.booleans()), max_size=200))
def test_no_waiting_tenant_is_left_behind(events):
    """Counters of tenants that have work stay within one request of each other."""
    queue: FairQueue[int] = FairQueue()
    for name in "abc":
        for n in range(300):
            queue.push(name, n)
    for name, size, _ in events:
        tenant, _ = queue.pop()
        queue.charge(tenant, missed=size)
        assert name in "abc"
    counters = [queue.counter(t) for t in "abc"]
    assert max(counters) - min(counters) <= 2000


def test_shares_and_removal():
    queue: FairQueue[int] = FairQueue()
    queue.share("big", 3.0)
    for n in range(60):
        queue.push("big", n)
        queue.push("small", n)
    assert queue.remove("small", 0) and not queue.remove("small", 0) and not queue.remove("nobody", 0)
    taken = []
    for _ in range(40):
        tenant, _ = queue.pop()
        queue.charge(tenant, missed=10)
        taken.append(tenant)
    assert 28 <= taken.count("big") <= 32
    queue.push("small", 7, front=True)
    assert queue._tenants["small"].queue[0] == 7


def test_idle_tenants_are_forgotten():
    queue: FairQueue[int] = FairQueue()
    for n in range(1000):
        queue.push(f"t{n}", n)
    while len(queue):
        queue.pop()
    queue.forget_idle()
    assert not queue._tenants


LIMITS = Limits(context=1000, pool=800, target=1.0, patience=2.0, most_waiting=10)


def test_what_can_never_run_is_refused_for_good():
    check_size(799, 1, LIMITS)
    with pytest.raises(Never, match="800"):
        check_size(800, 1, LIMITS)


def test_overload_is_refused_with_a_time():
    assert check_load(4.0, 4, 0.1, 0.2, 3, LIMITS) == pytest.approx(1.3)
    with pytest.raises(Overloaded) as error:
        check_load(40.0, 4, 0.0, 0.2, 3, LIMITS)
    assert error.value.retry_after == math.ceil(10.2 - 2.0)
    with pytest.raises(Overloaded, match=r"would take 4000\.2 s; try again in 60 s"):
        check_load(16_000.0, 4, 0.0, 0.2, 3, LIMITS)
    with pytest.raises(Overloaded, match="10 requests"):
        check_load(0.0, 4, 0.0, 0.2, 10, LIMITS)
    with pytest.raises(Overloaded, match="no prefill engine"):
        check_load(0.0, 0, 0.0, 0.2, 0, LIMITS)
    assert check_load(0.0, 1, 0.0, 60.0, 0, LIMITS) == 60.0, "a long prompt is no overload"


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=50))
def test_bucket_never_gives_more_than_rate_and_burst(asks):
    bucket, now, taken, largest = TokenBucket(2.0, 10.0, 0.0), 0.0, 0.0, 0.0
    for amount, wait in asks:
        now += wait
        delay = bucket.take(amount, now)
        assert delay >= 0
        if delay == 0:
            taken += amount
            largest = max(largest, amount)
    assert taken <= 10.0 + 2.0 * now + max(0.0, largest - 10.0) + 1e-6


def test_bucket_says_when():
    bucket = TokenBucket(2.0, 10.0, 0.0)
    assert bucket.take(10, 0.0) == 0.0
    delay = bucket.take(4, 1.0)
    assert delay == pytest.approx(1.0) and bucket.take(4, 1.0 + delay) == 0.0
    assert bucket.take(25, 100.0) == 0.0, "more than the burst passes a full bucket"
    assert bucket.take(1, 100.0) == pytest.approx(8.0), "and leaves a debt"
    assert bucket.take(0, 90.0) >= 0, "a clock that goes back gives nothing"


def test_wants():
    rate = Rate(10.0)
    for _ in range(100):
        rate = rate.after(60_000, 1.0)
    assert rate.value == pytest.approx(60_000, rel=1e-3)
    assert prefill_want(60_000, 0, 60_000, use=0.7) == 2
    assert prefill_want(0, 0, 60_000) == 0
    assert prefill_want(42_000, 420_000, 60_000) == 2
    assert decode_want(61, 0, 60, 10**6) == 2 and decode_want(1, 10**6, 60, 10**6) == 2 and decode_want(0, 0, 1, 1) == 0
    assert encoder_want(1000, 0, 1000) == 2
    with pytest.raises(ValueError, match="capacity"):
        prefill_want(1, 1, 0)


def _run(scaler, running, want, use, periods=1):
    total = Change()
    for _ in range(periods):
        change = scaler.period(running, want, use)
        total = Change(total.start + change.start, total.cancel + change.cancel, total.stop + change.stop)
    return total


def test_growth_is_limited_and_counts_what_is_coming():
    scaler = Scaler(ScalePolicy(most=100))
    assert scaler.period(8, 20, 0.9) == Change(), "one period is not enough"
    assert scaler.period(8, 20, 0.9).start == 2
    assert _run(scaler, 8, 10, 0.9, 10) == Change(), "two are coming"
    assert scaler.pending == 2
    scaler.came_up(2)
    assert scaler.pending == 0


def test_no_stop_while_used_or_when_the_rest_could_not_take_it():
    assert _run(Scaler(), 4, 2, 0.81, 50).stop == 0
    assert _run(Scaler(), 2, 1, 0.5, 50).stop == 0, "one would be at 1.0"
    assert _run(Scaler(), 4, 2, 0.5, 5).stop == 1
    assert _run(Scaler(), 4, 2, None, 50).stop == 0


def test_two_and_one_do_not_alternate():
    scaler, running, changes = Scaler(), 2, 0
    for _ in range(200):
        work = 1.1
        change = scaler.period(running, math.ceil(work / 0.7), work / running)
        running += change.start - change.stop
        scaler.came_up(change.start)
        changes += change.start + change.stop
    assert changes <= 1 and running == 2


def test_missing_metrics_hold_and_true_zero_scales_to_the_least():
    scaler = Scaler(ScalePolicy(least=1))
    assert _run(scaler, 4, None, None, 50) == Change()
    assert Scaler(ScalePolicy(least=2)).period(0, None, None).start == 2
    running = 4
    for _ in range(100):
        running -= scaler.period(running, 0, 0.0).stop
    assert running == 1
    to_zero = Scaler(ScalePolicy(least=0))
    running = 1
    for _ in range(20):
        running -= to_zero.period(running, 0, 0.0).stop
    assert running == 0


def test_starts_are_cancelled_before_anything_stops():
    scaler = Scaler()
    _run(scaler, 8, 12, 0.9, 2)
    assert scaler.pending == 2
    change = _run(scaler, 8, 8, 0.5, 5)
    assert change == Change(cancel=2) and scaler.pending == 0
    scaler.pending = 1
    scaler.failed_start()
    scaler.failed_start()
    assert scaler.pending == 0


@given(st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 50)), st.floats(0, 1)), max_size=200))
def test_bounds_hold(periods):
    policy = ScalePolicy(least=2, most=10)
    scaler, running = Scaler(policy), 2
    for want, use in periods:
        change = scaler.period(running, want, use)
        assert min(change.start, change.cancel, change.stop) >= 0
        running += change.start - change.stop
        scaler.came_up(change.start)
        assert policy.least <= running <= policy.most


def test_roles_trade_machines():
    moves, spares = trade({"prefill": Change(stop=1), "decode": Change(start=3), "encoder": Change()}, spares=5)
    assert moves == [("prefill", "decode")] and spares == 2
