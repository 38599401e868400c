"""Ranks as processes of this host over shared memory: tokens of one rank, a rank killed, a rank that hangs."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.balance.eplb import EplbSettings
from orchestrator.cluster.start import EpLLM
from orchestrator.engine.llm import LLM
from orchestrator.engine.request import SamplingParams
from orchestrator.model.checkpoint.reader import Checkpoint

TEXTS = ["def f(x):\n", "import os\n", "a = [1, 2]\n" * 12, "class A:\n"]
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=14 + 6 * i, ignore_eos=True) for i in range(4)]
OPTIONS = {"num_blocks": 48, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    return make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20)


@pytest.fixture(scope="module")
def expected(folder):
    return [(o.token_ids, o.text) for o in LLM(folder, **OPTIONS).generate(TEXTS, PARAMS, progress=False)]


def said(llm):
    return [(o.token_ids, o.text) for o in llm.generate(TEXTS, PARAMS)]


def share(folder, slots, draft_slots):
    """Bytes of the checkpoint that a rank has to read: all but tables that are mapped, and its own experts."""
    found, experts = 0, Counter()
    for name, entry in Checkpoint(folder).entries.items():
        size = entry.end - entry.begin
        if ".ffn.experts." in name:
            experts[name.split(".")[0]] = max(experts[name.split(".")[0]], 1 + int(name.split(".")[4]))
            found += size * (draft_slots if name.startswith("mtp.") else slots) if name.split(".")[4] == "0" else 0
        elif ".engram.embed." not in name:
            found += size
    assert experts == {"layers": 8, "mtp": 4}
    return found


@pytest.mark.parametrize(("signum", "overlap"), [(signal.SIGKILL, True), (signal.SIGSTOP, False)])
def test_four_processes_and_one_lost(folder, expected, signum, overlap):
    with EpLLM(folder, 4, slots=4, timeout=2.0, overlap=overlap, **OPTIONS) as llm:
        assert said(llm) == expected
        assert dict(llm.engine.bytes_read) == dict.fromkeys(range(4), share(folder, 4, 2))
        group = llm.engine
        ids = [group.submit(llm._encode(text), params) for text, params in zip(TEXTS, PARAMS, strict=True)]
        tokens = {name: [] for name in ids}
        seen = 0
        for event in group.events():
            if hasattr(event, "token_id"):
                tokens[event.request_id].append(event.token_id)
                seen += 1
                if seen == 12:
                    os.kill(group._workers.pids[1], signum)
        assert list(tokens.values()) == [ids for ids, _ in expected]
        (resize,) = group.resizes
        assert resize.lost == (1,) and resize.ranks == 3 and group.members == (0, 2, 3)
        assert resize.replayed == 1 and resize.kept > 0
        assert said(llm) == expected
    assert len({(left.steps, left.collectives) for left in group.left.values()}) == 1


def test_experts_move_between_processes(folder, expected):
    """Plans carried out over shared memory while requests run: the same tokens, and weights came from peers."""
    plans = EplbSettings(redundant=1, window=4, interval=16, least_tokens=0.0, least_gain=0.0)
    with EpLLM(folder, 3, eplb=plans, bytes_per_step=4000, **OPTIONS) as llm:
        group, limit = llm.engine, time.monotonic() + 120
        assert said(llm) == expected
        while not group.balance.plans.get("committed") and time.monotonic() < limit:
            group.poll(0.05)  # a plan is made in a process of its own, and idle ranks carry it out
        assert said(llm) == expected
    assert group.balance.plans.get("committed") and not group.balance.plans.get("dropped: stalled")
    assert group.balance.moe_lb >= 1 and set(group.balance.moe_lb_of) == {"prefill", "decode"}
    assert sum(left.bytes_moved.get("from peers", 0) for left in group.left.values()) > 0
    tables = {}
    for left in group.left.values():
        for (layer, slot), (expert, digest) in left.digests.items():
            assert tables.setdefault((layer, expert), digest) == digest, (layer, slot)


def test_v41_mini_gives_the_text_of_one_rank():
    mini = Path(__file__).parents[3] / "models" / "v41-mini"
    settings = {"num_blocks": 32, "max_num_seqs": 4, "dense": "fixed"}
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=6 + 3 * i, ignore_eos=True) for i in range(4)]
    alone = [o.token_ids for o in LLM(mini, **settings).generate(TEXTS, params, progress=False)]
    with EpLLM(mini, 5, **settings) as llm:
        with pytest.raises(ValueError, match="prompt: got dict"):
            llm.generate([TEXTS[0], {"text": "x"}])
        assert [o.token_ids for o in llm.generate(TEXTS, params)] == alone


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        EpLLM(tmp_path, 2)
