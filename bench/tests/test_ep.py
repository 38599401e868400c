"""`fathom bench ep` where there is no GPU: what it refuses, what rows say, and the pieces that need no device."""

from __future__ import annotations

import pytest

from bench.ep import command
from bench.ep.engine import SKEW, RandomRank, favoured, params, prompts, serve
from bench.ep.rows import OPS, digest, ledger_file
from bench.status import CURRENT, ORPHAN, STALE, gpus_of, states_of_ops
from orchestrator.engine.request import Finished, TokenOutput


@pytest.mark.parametrize(("gpus", "parts", "name"), [
    (1, ["faults"], "gpus"), (1000, ["faults"], "gpus"), (2, ["nothing"], "parts"), (2, [], "parts"),
])  # fmt: skip
def test_what_this_machine_lacks_is_refused_before_anything_starts(gpus, parts, name):
    from rich.console import Console

    with pytest.raises(ValueError, match=name):
        command.run(Console(quiet=True), gpus, parts, True, None)


def test_rows_of_several_gpus_have_a_ledger_of_their_own(tmp_path):
    assert ledger_file(tmp_path, "h200", 4).name == "h200x4.jsonl"
    assert [gpus_of(name) for name in ("h200", "h200x2", "h200x16", "cpu")] == [1, 2, 16, 1]


def test_a_row_is_stale_when_its_sources_change():
    now = {op: digest(op) for op in OPS}
    assert all(len(value) == 16 for value in now.values())
    rows = [{"op": op, "point": op, "digest": value, "date": "2026-01-01"} for op, value in now.items()]
    assert {s.state for s in states_of_ops(now, rows)} == {CURRENT}
    rows[0]["digest"] = "0" * 16
    rows.append({"op": "ep_comm.other", "point": "p", "digest": "0" * 16, "date": "2026-01-01"})
    assert [s.state for s in states_of_ops(now, rows)] == [STALE, *[CURRENT] * (len(OPS) - 1), ORPHAN]


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_the_skewed_load_is_on_one_rank(gpus):
    from orchestrator.balance.eplb import initial

    config = RandomRank(gpus).config()
    assert config.n_routed_experts == 6 * gpus
    chosen = favoured(config, gpus, 8)
    placed = initial(1, config.n_routed_experts, gpus, 8)
    ranks = {r for r in range(gpus) for e in placed.experts[0, r] if int(e) in chosen}
    assert len(chosen) == SKEW and len(ranks) == 1


def test_a_batch_is_timed_by_its_tokens():
    def events():
        for i in range(12):
            yield TokenOutput("a", i, "")
            yield TokenOutput("other", i, "")
        yield Finished("a", "length")

    served = serve(events(), ["a"])
    assert served.tokens == [list(range(12))] and served.gaps.runs == 3 and served.rate > 0
    with pytest.raises(RuntimeError, match="no token"):
        serve(iter([TokenOutput("a", 1, "")]), ["a", "b"])
    with pytest.raises(RuntimeError, match="broken"):
        serve(iter([Finished("a", "error", error="broken")]), ["a"])
    assert len({tuple(p) for p in prompts(100, 5)}) == 5 and [p.seed for p in params(2)] == [0, 1]


def test_free_places_can_be_listened_on():
    import socket

    host, port = command._free_place().split(":")
    with socket.create_server((host, int(port))):
        assert int(port) > 0
