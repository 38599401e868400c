"""Links, prefill engines and the decode group, by hand."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.balance.decode import fewest_requests, two_dimensional
from orchestrator.balance.prefill import BinSettings, PrefillBins, PrefillCost, Quota, turn
from orchestrator.simulate.figures import published as p
from orchestrator.simulate.figures.decode_pool import DecodePool
from orchestrator.simulate.figures.jobs import Job
from orchestrator.simulate.figures.links import Link
from orchestrator.simulate.figures.prefill_group import PrefillGroup
from orchestrator.simulate.figures.prefill_rules import Pull, Push, fewest, power_of_two, round_robin
from orchestrator.simulate.figures.study_decode import RULES, decode_only
from orchestrator.simulate.figures.workload import Arrivals

COST = PrefillCost(launch=0.01, token=1e-4)


def job(number: int, missed: int, hit: int = 0) -> Job:
    return Job.of(number, hit + missed, hit, COST)


def group(ranks: int = 2, most: float = 0.1, ahead: float = 0.1, late: bool = True) -> PrefillGroup:
    return PrefillGroup(0, ranks, COST, Quota(most, most), ahead, late)


def test_a_link_sends_one_after_the_other() -> None:
    link = Link(100.0)
    assert link.send(1.0, 50, tokens=5) == 1.5 and link.send(1.2, 100, tokens=7) == 2.5
    assert (link.waiting(1.4), link.waiting(1.5), link.waiting(2.6)) == (12, 7, 0)
    assert link.send(10.0, 0) == 10.0 and link.busy == 1.5
    with pytest.raises(ValueError, match="rate"):
        Link(0.0)
    with pytest.raises(ValueError, match="size"):
        link.send(0.0, -1)


def test_a_hit_replays_its_last_block() -> None:
    assert (job(0, 100, 1280).computed, job(0, 100, 1280).remaining) == (1152, 228)
    assert (job(0, 100, 128).computed, job(0, 100, 128).hit) == (0, 0)  # nothing is saved: no hit
    assert Job.of(0, 1280, 1280, COST).hit == 1152  # a token at least is computed
    assert job(0, 100, 1280).cost == pytest.approx(228e-4)


def test_a_step_lasts_as_long_as_its_fullest_rank() -> None:
    g = group()
    for n, missed in enumerate((512, 256)):
        g.take(job(n, missed))
    assert g.begin(0.0) == pytest.approx((0.01 + 0.0512, 0.0768))
    assert sorted(j.number for j in g.finish()) == [0, 1] and g.begin(1.0) is None


def test_long_prompts_are_cut_and_stay_on_their_rank() -> None:
    g = group()
    g.take(job(0, 2000))
    seconds, _ = g.begin(0.0) or (0.0, 0.0)
    assert seconds <= 0.1 and g.chunks[0][1].tokens == 896  # 0.09 s, whole blocks
    assert g.finish() == []
    g.take(job(1, 100))
    g.begin(0.1)
    ranks = {j.number: j.rank for j, _ in g.chunks}
    assert ranks[0] != ranks[1] and [j.number for j in g.finish()] == [1]
    g.begin(0.2)
    assert [j.number for j in g.finish()] == [0]


def test_prompts_wait_for_their_prefix() -> None:
    g = group()
    late = job(0, 100)
    late.ready = 5.0
    g.take(late)
    assert g.begin(4.9) is None and g.next_ready() == 5.0 and g.begin(5.0) is not None


def test_an_engine_asks_for_what_its_ranks_lack() -> None:
    g = group()
    assert g.want == pytest.approx(0.2)
    g.take(job(0, 5000))  # half a second: one rank has enough, the other asks
    assert g.want == pytest.approx(0.1)
    g.begin(0.0)
    assert g.want == pytest.approx(0.1) and g.longer(0.3) == 1 and g.longer(0.6) == 0
    early = group(late=False)
    early.take(job(1, 5000))
    assert early.want == pytest.approx(0.1)


def test_rules_that_send_at_once() -> None:
    robin = Push(2, 2, round_robin())
    assert [robin.put(job(n, 10), 0.0) for n in range(5)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0)]
    tokens, requests = Push(1, 2, fewest(1)), Push(1, 2, fewest(0))
    for rule, want in ((tokens, [0, 1, 1, 1]), (requests, [0, 1, 0, 1])):
        assert [(rule.put(job(n, m), 0.0) or (9, 9))[1] for n, m in enumerate((100, 10, 10, 10))] == want
    done = job(0, 100)
    done.rank = 0
    tokens.done(done, 0)
    assert tokens.put(job(9, 1), 0.0) == (0, 0) and tokens.pull(0, 0.0, False) is None and tokens.waiting() == 0
    two = Push(1, 8, power_of_two(random.Random(1)))
    counts = [0] * 8
    for n in range(64):
        counts[(two.put(job(n, 10), 0.0) or (0, 0))[1]] += 1
    assert max(counts) <= 11
    assert Push(1, 1, power_of_two(random.Random(1))).put(job(0, 1), 0.0) == (0, 0)


def test_one_queue_and_how_long_prompts_yield() -> None:
    first, yielding = Pull.by(None, COST, 2), Pull.by(None, COST, 2, yields=5.0)
    for rule in (first, yielding):
        rule.put(job(0, 10_000), 0.0)  # a second
        rule.put(job(1, 100), 4.0)
        rule.put(job(2, 100), 5.5)
        assert rule.waiting() == 3
    assert [j.number for j in iter(lambda: first.pull(0, 9.0, True), None)] == [0, 1, 2]
    assert [j.number for j in iter(lambda: yielding.pull(1, 9.0, False), None)] == [1, 0, 2]
    assert turn(3.0, 2.0, 5.0) == 13.0 and turn(3.0, 2.0, 0.0) == 3.0
    for cost, yields, name in ((-1.0, 0.0, "cost"), (math.nan, 0.0, "cost"), (1.0, -1.0, "yields")):
        with pytest.raises(ValueError, match=name):
            turn(0.0, cost, yields)


def test_bins_keep_kinds_apart() -> None:
    bins = PrefillBins(BinSettings())
    for engine in range(4):
        bins.add(f"{engine:04}")
    rule = Pull(lambda prompt: prompt.missed, bins)
    rule.put(job(0, 300_000), 0.0)
    owner = next(int(e) for e, b in bins.engines.items() if b == 3)
    other = next(int(e) for e, b in bins.engines.items() if b == 0)
    assert rule.pull(other, 0.1, True) is None and rule.pull(other, 0.1, False) is None
    assert (rule.pull(owner, 0.1, True) or job(9, 1)).number == 0
    rule.put(job(1, 300_000), 0.0)
    assert (rule.pull(other, 0.6, False) or job(9, 1)).number == 1  # it has waited: another helps
    for _ in range(8):
        rule.put(job(2, 30_000), 1.0)
        rule.round(2.0, 2.0)
    assert list(bins.engines.values()).count(1) == 3  # machines follow demand, by one at least where there is work


def _pool(choose=two_dimensional, ranks: int = 2, room: int = 10**9) -> DecodePool:
    return DecodePool(ranks, p.DECODE, choose, room, 100.0)


def test_decode_by_hand() -> None:
    arrivals = Arrivals(np.array([0.0, 0.0]), np.array([1000, 2000]), np.array([0, 0]), np.array([7, 3]))
    pool = _pool()
    run = decode_only(arrivals, pool)
    first = p.DECODE.step(1, 2000)  # one sequence on each rank, the longer one counts
    assert run["seconds"][0] == pytest.approx(first) and first == pytest.approx(
        3.2 / 330 - (8 * 77_000 - 2000) * p.DECODE.token
    )
    assert run["seconds"][1] == pytest.approx(p.DECODE.step(1, 1003.2))  # 3 tokens take one step, 7 take three
    assert len(run["seconds"]) == 3 and run["done"].tolist() == [pytest.approx(run["seconds"].sum()), run["first"][1]]
    assert np.abs(pool.tokens).max() < 1e-6 and not pool.sequences.any()
    assert all(e.requests == 0 and e.room == 10**9 for e in pool.engines)


def test_decode_cost_goes_through_the_published_points() -> None:
    for sequences, rate in p.DECODE_POINTS:
        assert 3.2 / p.DECODE.step(sequences, sequences * 77_000) == pytest.approx(rate)
    assert p.DECODE.step(34.5, 0.0) == pytest.approx((p.DECODE.step(34, 0.0) + p.DECODE.step(35, 0.0)) / 2, rel=1e-6)
    for tokens, seconds in p.PREFILL_POINTS:
        assert p.PREFILL.launch + p.PREFILL.token * tokens == pytest.approx(seconds, rel=0.025)
    with pytest.raises(ValueError, match="token"):
        p.DecodeCost(p.DECODE.curve, -1.0, 3.2)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 9000), st.integers(0, 60)), max_size=25),
    st.sampled_from(sorted(RULES)),
    st.integers(9200, 20_000),
)
def test_decode_gives_every_token_whatever_the_room(rows: list, rule: str, room: int) -> None:
    rows = sorted(rows)
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    times, tokens, outputs = (np.array(list(c)) for c in columns)
    arrivals = Arrivals(times, tokens, np.zeros(len(rows), np.int64), outputs)
    pool = _pool(RULES[rule](1), 3, room)
    run = decode_only(arrivals, pool)
    assert run["given"].sum() == outputs.sum() and not np.isnan(run["done"]).any()
    assert (run["first"] > times).all() and (run["done"] >= run["first"]).all()
    assert (run["seconds"] >= run["alike"] - 1e-12).all()  # equal ranks are a bound
    assert all(e.requests == 0 and e.room == room for e in pool.engines) and np.abs(pool.tokens).max() < 1e-6


def test_what_never_fits_is_said() -> None:
    pool = _pool(fewest_requests, room=100)
    pool.put(0, 1000, 5)
    with pytest.raises(ValueError, match="room: got 100"):
        pool.begin()


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="ranks"):
        group(ranks=0)
    with pytest.raises(ValueError, match="ahead"):
        group(ahead=0.0)
    with pytest.raises(ValueError, match="ranks"):
        _pool(ranks=0)
