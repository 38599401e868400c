"""The same service with its workers kept by actors of Ray."""

from __future__ import annotations

import signal
import time

import pytest
from proof_kit import Load, check, config, every_kind, some

from bench.service import faults
from bench.service.clients import complaints
from bench.service.park import Park, Shape
from bench.service.processes import look

pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module")
def ray_park(serves, device, serve_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    settings = config(folder, 30.0)
    if device == "cuda":
        settings["cluster"]["gpus"] = 0.25  # all on the first; Ray hides GPUs from actors that ask for none
    with Park(Shape("ray", 1, 1, 1), folder, options=serve_options, config=settings) as made:
        made.wait_serving(400)
        yield made


def test_every_kind(reference, ray_park):
    check(reference, ray_park, every_kind(72)[::2])
    ray_park.wait_idle()


def test_a_worker_and_an_actor_are_killed(reference, ray_park):
    """The worker's process is a child of its actor, and neither may be missed."""
    wanted = some(73, 8, kinds=("sampled", "long"), tokens=96)
    expected = reference.answers(wanted)
    lives = {worker.name: worker.life for worker in ray_park.workers()}
    with Load(ray_park, wanted, at_once=8) as load:
        time.sleep(1.5)
        assert faults.kill(ray_park, ray_park.worker("decode-0")) is not None
        worker = look(ray_park.worker("prefill-0").pid)
        actor = None if worker is None else look(worker.parent)
        assert worker is not None and actor is not None and "PrefillActor" in actor.command
        actor.send(signal.SIGKILL)
        ray_park.wait(lambda: not worker.alive(), 30, "to lose the worker with its actor")
    assert complaints(expected, load.got) == {} and load.got.keys() == expected.keys()
    ray_park.wait_up(300)
    assert all(ray_park.worker(name).life > lives[name] for name in ("decode-0", "prefill-0"))
    ray_park.wait_idle()


def test_nothing_outlives_it(ray_park):
    ended = ray_park.stop(90)
    assert ended.status == 0 and ended.left == (), ended.log
