"""A Ray cluster of two nodes on this machine: one of them dies, then Ray's control service hangs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
os.environ.update(RAY_health_check_period_ms="1000", RAY_health_check_timeout_ms="2000")
from supervise_kit import WAITS, from_values, python, spec_of, until
from orchestrator.service.supervise.launch.ray import RayLauncher, import_ray

import_ray()
from ray.cluster_utils import Cluster

node = {"num_cpus": 2, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
second = cluster.add_node(**node)
config = from_values({
    "roles": {"prefill": 2, "decode": 2},
    "cluster": {"launcher": "ray", "address": cluster.address, "strategy": "SPREAD"},
})
launcher = RayLauncher(config, "test", python(WAITS))
assert launcher.host not in ("127.0.0.1", "localhost"), launcher.host

def start(name, life):
    return launcher.start(spec_of(config, name, name.split("-")[0], life, sys.argv[2]))

def started(handles):
    until(lambda: all(handle.pid or handle.poll() for handle in handles), "start", 240)
    assert all(handle.poll() is None for handle in handles), [handle.poll() for handle in handles]

names = ("router", "prefill-0", "prefill-1", "decode-0", "decode-1")
handles = {name: start(name, 1) for name in names}
started(handles.values())
os.kill(second.all_processes["raylet"][0].process.pid, signal.SIGKILL)
dead = until(lambda: [name for name in names if handles[name].poll()], "the node's death", 120)
time.sleep(2)
dead = [name for name in names if handles[name].poll()]
assert 0 < len(dead) < len(names) and {handles[name].poll() for name in dead} == {"actor died"}, dead
for name in dead:
    handles[name] = start(name, 2)
started(handles.values())

gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
os.kill(gcs, signal.SIGSTOP)
try:
    began = time.monotonic()
    handles["decode-0"].kill()
    until(handles["decode-0"].poll, "the end of a child without Ray's control service", 30)
    handles["decode-0"] = start("decode-0", 3)
    assert time.monotonic() - began < 30
    started([handles["decode-0"]])
finally:
    os.kill(gcs, signal.SIGCONT)
launcher.close()
cluster.shutdown()
print("all well")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed here")
def test_death_of_a_node_and_a_control_service_that_hangs(tmp_path):
    kit = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kit, str(tmp_path)], capture_output=True, text=True, timeout=590
    )
    assert "all well" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
