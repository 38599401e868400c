"""The front ends: streams first, then everything; nothing outlives it."""

from __future__ import annotations

import pytest
from proof_kit import Load, config, some

from bench.service import processes
from bench.service.clients import complaints
from bench.service.park import Park, Shape


@pytest.fixture
def small(serves, serve_options, tmp_path):
    with Park(Shape("local", 1, 1, 0), tmp_path, options=serve_options, config=config(tmp_path, 60.0)) as made:
        made.wait_serving()
        yield made


def test_streams_end_before_the_service(reference, small):
    wanted = some(71, 4, kinds=("sampled",), tokens=120)
    expected = reference.answers(wanted)
    with Load(small, wanted, at_once=4) as load:
        small.wait(lambda: any(worker.held for worker in small.workers()), 60, "to begin")
        ended = small.stop()
    assert complaints(expected, load.got) == {} and load.got.keys() == expected.keys()
    assert ended.status == 0 and ended.left == (), ended.log


def test_workers_do_not_outlive_a_killed_front(small):
    everybody = small.processes()
    small.front.kill()
    small.front.wait(10)
    assert processes.wait_gone(small._mark, 30.0) == [], [p.command for p in everybody]
