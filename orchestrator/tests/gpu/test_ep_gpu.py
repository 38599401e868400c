"""Experts over the GPUs of a host: the tokens of one GPU, while experts move too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from orchestrator.balance.eplb import EplbSettings
from orchestrator.engine.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs of one host"),
]
FOLDER = Path(__file__).parents[3] / "models" / "v41-mini"
TEXTS = ["def fibonacci(n):\n", "import os\nimport sys\n", "class Stack:\n    def", "for i in range(10):\n", "try:\n"]
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=20 + 9 * i, ignore_eos=True) for i in range(5)]
COMMON = {"num_blocks": 96, "max_num_seqs": 8, "device": "cuda", "max_step_tokens": 256}
ALONE = {"overlap": False, "cuda_graphs": False, "speculation": "off"}


@pytest.fixture(scope="module")
def expected():
    from orchestrator.engine.llm import LLM

    if not FOLDER.is_dir():
        pytest.skip("models/v41-mini is not there")
    torch.cuda.set_device(0)
    return [o.token_ids for o in LLM(FOLDER, **COMMON, **ALONE).generate(TEXTS, PARAMS, progress=False)]


@pytest.mark.parametrize(
    "options",
    [ALONE, {"overlap": False, "speculation": "off"}, {"speculation": "off"}, {}, {"max_step_tokens": 2048}],
    ids=["eager", "graphs", "overlapped", "drafts", "dispatched"],
)
def test_two_gpus_give_the_tokens_of_one(expected, options):
    from orchestrator.cluster.start import EpLLM

    with EpLLM(FOLDER, 2, timeout=20.0, **(COMMON | options)) as llm:
        for _ in range(2):  # the second time from recorded graphs
            assert [o.token_ids for o in llm.generate(TEXTS, PARAMS)] == expected
        assert llm.engine.resizes == []


def test_experts_move_between_gpus_meanwhile(expected):
    from orchestrator.cluster.start import EpLLM

    plans = EplbSettings(redundant=2, window=8, interval=8, least_tokens=0.0, least_gain=0.0)
    with EpLLM(FOLDER, 2, timeout=20.0, eplb=plans, bytes_per_step=1 << 20, **COMMON) as llm:
        end, rounds = time.monotonic() + 40, 0
        while time.monotonic() < end and (rounds < 3 or llm.engine.balance.plans.get("committed", 0) < 2):
            assert [o.token_ids for o in llm.generate(TEXTS, PARAMS)] == expected
            rounds += 1
        group = llm.engine
    left = group.left
    assert left[0].plans["committed"] >= 1, (left[0].plans, rounds)
    assert sum(rank.bytes_moved.get("from peers", 0) for rank in left.values()) > 0
    assert left[0].moe_lb and all(lb >= 1 for lb in left[0].moe_lb)
