"""The whole service: nothing is lost, nothing takes less time than it can, balanced is a bound."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.balance.admission import Limits
from orchestrator.balance.decode import fewest_tokens
from orchestrator.balance.prefill import PrefillCost, Quota
from orchestrator.simulate.figures import published as p
from orchestrator.simulate.figures.configs import ALL, EVEN, OURS, Config
from orchestrator.simulate.figures.jobs import At, Record
from orchestrator.simulate.figures.measure import Summary, Targets, balanced_seconds, crossing, summarise
from orchestrator.simulate.figures.service import Cluster, serve
from orchestrator.simulate.figures.workload import Arrivals

SMALL = Cluster(engines=4, ranks=4, decode=16)


def traffic(rate: float, seconds: float, seed: int = 0) -> Arrivals:
    """Poisson, heavy-tailed as agents are: few prompts hold much of the work."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate * seconds)
    missed = np.minimum(rng.lognormal(6.8, 1.6, count), 300_000).astype(np.int64) + 1
    hits = rng.integers(0, 800, count) * 128
    return Arrivals(np.sort(rng.uniform(0, seconds, count)), hits + missed, hits, rng.integers(0, 900, count))


def computed(arrivals: Arrivals) -> int:
    """Missed tokens, and the 128 that a hit computes again."""
    hits = np.where(arrivals.hits > 128, arrivals.hits - 128, 0)
    return int((arrivals.tokens - hits).sum())


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.name)
def test_every_rule_serves_every_token_once(config: Config) -> None:
    arrivals = traffic(150.0, 3.0)
    cluster, record = config.run(arrivals, SMALL, seed=1)
    assert record.computed == computed(arrivals)
    assert (record.outputs == arrivals.outputs).all() and not record.refused.any()
    assert not np.isnan(record.times).any()
    assert (np.diff(record.times, axis=1) >= 0).all()  # every point after the one before
    assert (record.times[:, At.FIRST] > record.times[:, At.MOVED]).all()
    own = [cluster.prefill.prompt(int(m), 0) for m in arrivals.missed]
    assert (record.times[:, At.PREFILLED] - record.times[:, At.STARTED] >= np.array(own) - 1e-9).all()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 0.5), st.integers(1, 40_000), st.integers(0, 3000), st.integers(0, 30)),
        min_size=0,
        max_size=12,
    ),
    st.sampled_from(ALL),
)
def test_any_few_requests(rows: list, config: Config) -> None:
    rows = sorted(rows)
    times, missed, blocks, outputs = (np.array(c) for c in zip(*rows, strict=True)) if rows else (np.empty(0),) * 4
    hits = blocks.astype(np.int64) * 128
    arrivals = Arrivals(times, hits + missed.astype(np.int64), hits, outputs.astype(np.int64))
    _, record = config.run(arrivals, replace(SMALL, engines=2, ranks=2, decode=3), seed=2)
    assert record.outputs.tolist() == outputs.tolist() and record.computed == computed(arrivals)


def test_one_request_by_hand() -> None:
    arrivals = Arrivals(np.array([1.0]), np.array([12_800]), np.array([10_240]), np.array([10]))
    record = serve(arrivals, SMALL, OURS.rule(SMALL, 0))
    t, size = record.times[0], 10_240 * 890
    assert t[At.QUEUED] - t[At.ARRIVED] == pytest.approx(p.MATCH.value)
    assert t[At.PULLED] == t[At.QUEUED]
    assert t[At.FETCHED] - t[At.PULLED] == pytest.approx(p.STORE_LATENCY.value + size / 50e9)
    assert t[At.READY] - t[At.FETCHED] == pytest.approx(size / 4 / 50e9)
    assert t[At.STARTED] == t[At.READY]
    assert t[At.PREFILLED] - t[At.STARTED] == pytest.approx(24.4e-3 + 2688 * 10.74e-6)
    assert t[At.MOVED] - t[At.PREFILLED] == pytest.approx((12_800 * 890 + 1_415_040) / 50e9)
    assert t[At.FIRST] - t[At.MOVED] == pytest.approx(p.DECODE.step(1, 12_800))
    later = sum(p.DECODE.step(1, 12_800 + 3.2 * k) for k in (1, 2, 3))  # ten tokens take four steps
    assert t[At.DONE] - t[At.FIRST] == pytest.approx(later)


def test_the_same_seed_gives_the_same_run() -> None:
    arrivals = traffic(200.0, 2.0)
    for config in (OURS, next(c for c in ALL if c.name == "power of two")):
        first, second, other = (config.run(arrivals, SMALL, seed)[1].times for seed in (1, 1, 2))
        assert np.array_equal(first, second)
        assert config is OURS or not np.array_equal(first, other)


def test_who_would_come_too_late_is_refused_and_the_others_are_served() -> None:
    arrivals = traffic(900.0, 4.0)
    limits = Limits(context=1 << 20, pool=10**9, target=1.0, patience=1.0)
    record = serve(arrivals, replace(SMALL, limits=limits), OURS.rule(SMALL, 0))
    free = serve(arrivals, SMALL, OURS.rule(SMALL, 0))
    assert 0 < record.refused.sum() < len(arrivals)
    kept = ~record.refused
    assert (record.outputs[kept] == arrivals.outputs[kept]).all() and not np.isnan(record.times[kept]).any()
    assert not record.outputs[~kept].any() and np.isnan(record.times[~kept, At.QUEUED]).all()
    first = [r.times[k, At.FIRST] - r.times[k, At.ARRIVED] for r, k in ((record, kept), (free, slice(None)))]
    assert first[0].mean() < 0.7 * first[1].mean()


@pytest.mark.parametrize("seed", range(2))
def test_balanced_is_an_upper_bound(seed: int) -> None:
    """Everything at once: no rule is through before a perfectly balanced offline run, and all GPUs as one is first."""
    arrivals = traffic(400.0, 1.0, seed)
    arrivals = Arrivals(np.zeros(len(arrivals)), arrivals.tokens, arrivals.hits, arrivals.outputs)
    bound = balanced_seconds(arrivals, SMALL).sum() / SMALL.gpus
    through = {}
    for config in ALL:
        record = config.run(arrivals, SMALL, seed)[1]
        through[config.name] = float(record.times[:, At.PREFILLED].max())
        assert through[config.name] >= bound
    assert min(through, key=through.__getitem__) == "even"


def test_even_ranks_decode_faster() -> None:
    arrivals = traffic(400.0, 2.0)
    plain, even = (
        serve(arrivals, replace(SMALL, balanced=b, choose=lambda: fewest_tokens), OURS.rule(SMALL, 0))
        for b in (False, True)
    )
    for record in (plain, even):
        turns = np.array(record.turns)
        assert (turns[:, 1] >= turns[:, 2] - 1e-12).all()
    assert np.array(even.turns)[:, 1].sum() < np.array(plain.turns)[:, 1].sum()


def test_balanced_seconds_by_hand() -> None:
    cluster = replace(SMALL, prefill=PrefillCost(launch=0.0, token=1e-3, pair=1e-9, prefix=1e-6, tail=0.5))
    arrivals = Arrivals(np.zeros(2), np.array([1000, 300]), np.array([640, 128]), np.ones(2, np.int64))
    computed_before = 640 - 128
    missed = 1000 - computed_before
    one = 1e-3 * missed + 1e-6 * computed_before + 1e-9 * missed * (computed_before + missed / 2) + 0.5
    assert balanced_seconds(arrivals, cluster) == pytest.approx([one, 0.3 + 1e-9 * 300 * 150 + 0.5])
    assert balanced_seconds(arrivals, SMALL)[1] == pytest.approx(300 * 10.74e-6 * (1 + 24.4e-3 / (10.74e-6 * 65_536)))


def test_summary_by_hand() -> None:
    arrivals = Arrivals(np.array([0.0, 1.0, 2.0, 3.0]), np.full(4, 1000), np.full(4, 500), np.array([5, 32, 32, 32]))
    record = Record.empty(4)
    for i in range(4):
        record.times[i] = arrivals.times[i] + np.array([0, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.5, 1.0])
    record.times[2, At.FIRST :] = 5.0, 5.1  # late
    record.outputs[:] = arrivals.outputs
    record.refused[3] = True
    record.steps = [(1.0, 0.1244, 0.2, 4), (9.0, 5.0, 0.0, 4)]
    record.turns = [(1.5, 0.02, 0.01, 32), (1.6, 0.04, 0.01, 32)]
    found = summarise(arrivals, record, SMALL, 1.0, 4.0)
    assert (found.rate, found.refused, found.hit_rate) == (1.0, pytest.approx(1 / 3), 0.5)
    assert found.mean == pytest.approx((0.5 + 3.0) / 2) and found.p50 == pytest.approx(1.75)
    assert found.split["match"] == pytest.approx(0.1) and found.split["first decode"] == pytest.approx((0.1 + 2.6) / 2)
    assert sum(found.split.values()) == pytest.approx(found.mean)
    assert found.token == pytest.approx((0.5 + 0.1) / 2 / 28.8) and found.goodput == 0.0  # 17 ms a token, and 3 s
    assert found.step == pytest.approx(0.1244) and found.lockstep == pytest.approx(0.2 / 0.4)
    assert found.launch_share == pytest.approx(24.4 / 124.4) and found.decode_alike == pytest.approx(0.01)
    assert found.sequences == 2.0
    loose = summarise(arrivals, record, SMALL, 1.0, 4.0, Targets(p99=4.0, token=0.02))
    assert loose.goodput == pytest.approx(2 / 3)
    for begin, end in ((4.0, 1.0), (50.0, 60.0)):
        with pytest.raises(ValueError, match="begin"):
            summarise(arrivals, record, SMALL, begin, end)


def _point(share: float, mean: float) -> Summary:
    values = dict.fromkeys(Summary.__dataclass_fields__, 0.0)
    return Summary(**{**values, "share": share, "mean": mean, "split": {}, "nic": {}})  # type: ignore[arg-type]


def test_where_targets_stop_to_hold() -> None:
    points = [_point(0.9, 0.8), _point(0.5, 0.2), _point(0.7, 0.3)]
    assert crossing(points, Targets()) == (pytest.approx(0.7 + 0.2 * 0.25 / 1.25), "")
    assert crossing(points[1:], Targets()) == (0.7, ">")
    assert crossing([_point(0.4, 0.8)], Targets()) == (0.4, "<")
    with pytest.raises(ValueError, match="points"):
        crossing([], Targets())


def test_nothing_arrives() -> None:
    nothing = Arrivals(*(np.empty(0, t) for t in (float, np.int64, np.int64, np.int64)))
    assert len(serve(nothing, SMALL, OURS.rule(SMALL, 0)).times) == 0


def test_bad_clusters() -> None:
    for name in ("engines", "ranks", "decode"):
        with pytest.raises(ValueError, match=f"{name}: got 0"):
            replace(SMALL, **{name: 0})


def test_the_second_path_is_taken_only_where_it_may() -> None:
    arrivals = traffic(400.0, 1.0)
    slow = replace(SMALL, nic=1e9)
    both = serve(arrivals, slow, OURS.rule(slow, 0))
    one = serve(arrivals, replace(slow, gain=1 << 60), OURS.rule(slow, 0))
    assert both.reads_by_decode > 0 == one.reads_by_decode
    fetch = [float((r.times[:, At.FETCHED] - r.times[:, At.PULLED]).mean()) for r in (both, one)]
    assert fetch[0] < fetch[1] and math.isfinite(fetch[1])


def test_the_bound_has_quota_enough() -> None:
    assert EVEN.cluster(SMALL).quota == Quota(0.3, 0.3, 1 << 60)
