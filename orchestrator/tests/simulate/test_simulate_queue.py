"""The virtual clock, the streams of random numbers and the links."""

from __future__ import annotations

from random import Random

import pytest

from orchestrator.simulate.network import HEALTHY, LinkQuality, Network
from orchestrator.simulate.queue import EventQueue
from orchestrator.simulate.streams import Streams


def order(seed):
    queue, seen = EventQueue(Random(seed)), []
    for n in range(8):
        queue.at(1.0, seen.append, n)
    queue.at(0.5, seen.append, "first")
    while queue.step():
        pass
    return seen


def test_ties_are_drawn_from_the_seed():
    assert order(1) == order(1)
    assert order(1)[0] == "first"
    assert len({tuple(order(seed)) for seed in range(5)}) == 5


def test_time_never_goes_back():
    queue, times = EventQueue(Random(0)), []
    queue.at(2.0, lambda: queue.at(1.0, lambda: times.append(queue.now)))
    assert queue.next_time == 2.0
    while queue.step():
        pass
    assert times == [2.0] and queue.done == 2 and queue.next_time is None and not queue.step()
    for delay in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="delay"):
            queue.after(delay, times.append)


def test_streams_do_not_shift_each_other():
    one, two = Streams(7), Streams(7)
    one("a").random()
    assert one("b").random() == two("b").random()
    assert two("a").random() != two("b").random()
    assert Streams(8)("a").random() != Streams(7)("a").random()


def pair(seed=0):
    queue = EventQueue(Random(seed))
    got: list[tuple[str, str, int]] = []
    network = Network(queue, Random(seed), lambda source, target, message: got.append((source, target, message)))
    return queue, network, got


def drain(queue):
    while queue.step():
        pass


def test_a_healthy_link_loses_nothing_and_passes_by():
    queue, network, got = pair()
    for n in range(200):
        network.send("a", "b", n)
    assert not got
    drain(queue)
    assert sorted(message for _, _, message in got) == list(range(200))
    assert [message for _, _, message in got] != list(range(200))
    assert queue.now < 0.05


def test_a_cut_has_one_direction_and_is_counted():
    queue, network, got = pair()
    network.cut("a", "b")
    network.cut("a", "b")
    network.join("a", "b")
    network.send("a", "b", 1)
    network.send("b", "a", 2)
    network.join("a", "b")
    network.send("a", "b", 3)
    drain(queue)
    assert sorted(message for _, _, message in got) == [2, 3]
    assert network.counts["cut"] == 1


def test_loss_doubles_and_late_ones():
    queue, network, got = pair()
    network.set_quality("a", "b", LinkQuality(loss=0.5, twice=0.5, late=0.2, hold=3.0))
    for n in range(400):
        network.send("a", "b", n)
        network.send("b", "a", n)
    drain(queue)
    there = [message for source, _, message in got if source == "a"]
    assert 120 < len(set(there)) < 280 and len(there) > len(set(there))
    assert len(got) - len(there) == 400
    assert 2.0 < queue.now < 3.1
    network.heal()
    assert network.quality is HEALTHY
    network.send("a", "b", -1)
    drain(queue)
    assert got[-1] == ("a", "b", -1)


def test_a_message_to_oneself_passes_no_link():
    queue, network, got = pair()
    network.quality = LinkQuality(loss=1.0)
    network.send("a", "a", 1)
    assert not got
    drain(queue)
    assert got == [("a", "a", 1)] and queue.now == 0.0


@pytest.mark.parametrize("bad", [{"loss": 1.5}, {"twice": -1}, {"delay": -1.0}, {"late": float("nan")}])
def test_impossible_links_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LinkQuality(**bad)
