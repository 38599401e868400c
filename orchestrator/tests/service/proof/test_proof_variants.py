"""The same service over expert-parallel groups, and with another kind of links."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from proof_kit import Load, check, config, counted, some

from bench.service.clients import complaints
from bench.service.park import Park, Shape

KINDS = ("greedy", "sampled", "long")


def test_groups_behind_the_roles(reference, device, serve_options, tmp_path):
    """Two ranks behind prefill and decode each; a rank of the decode worker dies while it decodes."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs: a rank has one")
    groups = {**config(tmp_path), "roles": {"prefill_ep": 2, "decode_ep": 2}}
    wanted = some(61, 6, kinds=KINDS, tokens=64)
    expected = reference.answers(wanted)
    with Park(Shape("local", 1, 1, 0), tmp_path, options=serve_options, config=groups) as park:
        park.wait_serving()
        check(reference, park, some(62, 3, kinds=KINDS))
        assert counted(park)["prefill ranks"] == counted(park)["decode ranks"] == 2
        with Load(park, wanted, at_once=6) as load:
            park.wait(lambda: any(w.role == "decode" and w.held for w in park.workers()), 60, "to decode")
            time.sleep(0.5)
            os.kill(int(counted(park)["decode rank1_pid"]), signal.SIGKILL)
        assert complaints(expected, load.got) == {} and load.got.keys() == expected.keys()
        park.wait(lambda: counted(park)["decode group"] >= 1, 60, "to form anew")
        park.wait_idle()
        decode = next(worker for worker in park.workers() if worker.role == "decode")
        assert decode.life == 1, "the group formed anew, in the same process"


def test_states_move_over_mooncake(reference, serve_options, tmp_path):
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        pytest.skip(f"Mooncake's wheel cannot be loaded here ({error}); Debian: apt-get install libibverbs1")
    links = {**config(tmp_path), "transfer": {"kind": "mooncake"}}
    with Park(Shape("local", 1, 1, 0), tmp_path, options=serve_options, config=links) as park:
        park.wait_serving()
        check(reference, park, some(63, 6, kinds=KINDS))
        park.wait(lambda: counted(park)["decode handoffs in"] >= 6, 30, "to count states")
