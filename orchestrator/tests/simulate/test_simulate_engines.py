"""The toy engines: they give the reference's tokens over every way of state, and keep their memory."""

from __future__ import annotations

import msgspec
import pytest
from simulate_kit import Bench, right, spec

from orchestrator.roles import engine_port as port
from orchestrator.roles.messages import Image
from orchestrator.roles.state_parts import KINDS, fault_of, is_whole
from orchestrator.simulate.toy.prefill import LAYOUT

KEY = ("r", 1)


def finish(bench, engine, key, output):
    for _ in range(200):
        (out,) = bench.run(engine, key).outputs
        output += out.tokens
        if out.reason:
            return out.reason, list(output)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_prefill_transfer_decode_gives_the_reference(early, drafts, length):
    bench = Bench()
    p, d = bench.prefill(stop_early=early), bench.decode(drafts=drafts)
    asked = spec(length, 20, seed=4, tenant="a", grammar="json", images=(Image("x", 3), Image("y", 3)))
    bench.take_in(p, KEY, asked)
    exported, loaded = bench.hand_over(p, d, KEY, asked)
    assert fault_of(exported.manifest, LAYOUT, length, (), grammar=True) == ""
    assert {part.kind for part in exported.manifest.parts} == set(KINDS)
    assert all(is_whole(*pair) for pair in zip(exported.manifest.parts, exported.parts, strict=True))
    assert exported.manifest.replay_tail is early and not loaded.why
    reason, output = finish(bench, d, KEY, exported.manifest.output)
    assert (reason, output) == ("length", right(asked))
    for engine in (p, d):
        assert isinstance(bench.ask(engine, port.Drop(*KEY)), port.Dropped)
        assert isinstance(bench.ask(engine, port.Drop(*KEY)), port.Dropped)
        assert engine.cells.pool.counts["live"] == 0 and engine.cells.adds_up
    assert not bench.checks.wrongs


@pytest.mark.parametrize("stop", [0, 1, 7])
@pytest.mark.parametrize("early", [False, True])
def test_answers_end_where_the_model_ends_them(stop, early):
    bench = Bench()
    p, d, asked = bench.prefill(stop_early=early), bench.decode(), spec(50, 9, stop=stop)
    bench.take_in(p, KEY, asked)
    exported = bench.ask(p, port.Export(*KEY))
    if stop == 0 and not early:
        assert exported.manifest.reason == "stop" and not exported.parts
        assert list(exported.manifest.output) == right(asked, stop)
        return
    bench.hand_over(p, d, KEY, asked)
    assert finish(bench, d, KEY, exported.manifest.output) == ("stop", right(asked, stop))


def test_one_token_is_a_whole_answer():
    bench = Bench()
    p, asked = bench.prefill(), spec(50, 1)
    bench.take_in(p, KEY, asked)
    manifest = bench.ask(p, port.Export(*KEY)).manifest
    assert (manifest.reason, list(manifest.output)) == ("length", right(asked))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_is_lost_on_the_way_changes_the_answer(kind):
    bench = Bench()
    p, d, asked = bench.prefill(), bench.decode(), spec(301, 12, seed=5, grammar="json")
    bench.take_in(p, KEY, asked)
    exported = bench.ask(p, port.Export(*KEY))
    parts = [
        b"" if part.kind == kind else data for part, data in zip(exported.manifest.parts, exported.parts, strict=True)
    ]
    bench.ask(d, port.Load(*KEY, asked, exported.manifest, tuple(parts)))
    _, output = finish(bench, d, KEY, exported.manifest.output)
    assert output[0] == right(asked)[0] and output != right(asked)


@pytest.mark.parametrize("after", [0, 1, 5, 13])
def test_a_migrated_answer_goes_on(after):
    bench = Bench()
    p, a, b = bench.prefill(), bench.decode("a", drafts=0), bench.decode("b", drafts=0)
    asked = spec(255, 30, grammar="json", tenant="t")
    bench.take_in(p, KEY, asked)
    exported, _ = bench.hand_over(p, a, KEY, asked)
    output = exported.manifest.output
    for _ in range(after):
        output += bench.run(a, KEY).outputs[0].tokens
    moved, loaded = bench.hand_over(a, b, KEY, asked)
    assert moved.manifest.output == output and not loaded.why
    b.do(port.Rename(*KEY, 2))
    assert finish(bench, b, ("r", 2), output) == ("length", right(asked))
    bench.run(a, KEY)  # it is frozen there
    assert bench.checks.wrongs
    bench.checks.wrongs.clear()
    a.do(port.Thaw(*KEY))
    assert finish(bench, a, KEY, output) == ("length", right(asked))


@pytest.mark.parametrize("done", [1, 6, 130])
def test_replay_after_a_crash_goes_on(done):
    bench = Bench()
    p, d, asked = bench.prefill(blocks=40), bench.decode(), spec(200, 150, grammar="regex")
    output = tuple(right(asked)[:done])
    bench.take_in(p, KEY, asked, output)
    exported, _ = bench.hand_over(p, d, KEY, asked)
    assert finish(bench, d, KEY, exported.manifest.output) == ("length", right(asked))


def test_hits_from_memory_and_store_give_the_same():
    bench = Bench()
    p, q, asked = bench.prefill("p"), bench.prefill("q"), spec(300, 5)
    assert bench.take_in(p, KEY, asked)[0].computed == 0
    bench.ask(p, port.Drop(*KEY))
    assert bench.take_in(p, ("s", 1), asked)[0].computed == 256 and not bench.checks.blocks
    assert bench.take_in(q, ("t", 1), asked)[0].computed == 256 and bench.checks.blocks == [True, True]
    for engine, key in ((p, ("s", 1)), (q, ("t", 1))):
        assert list(bench.ask(engine, port.Export(*key)).manifest.output) == right(asked)[:1]
    other = msgspec.structs.replace(asked, tenant="b")
    assert bench.take_in(q, ("u", 1), other)[0].computed == 0
    pictured = msgspec.structs.replace(asked, images=(Image("x", 1),))
    assert bench.take_in(q, ("v", 1), pictured)[0].computed == 0
    bench.store.up = False
    assert bench.take_in(bench.prefill("w"), ("x", 1), asked)[0].computed == 0


def test_full_memory_is_refused_and_nothing_is_kept():
    bench = Bench()
    p, d, asked = bench.prefill(blocks=4), bench.decode(blocks=3, drafts=0), spec(380, 40)
    bench.take_in(p, KEY, asked)
    began, _ = bench.take_in(p, ("s", 1), spec(380, 4, tenant="z"))
    assert began.why == "no memory" and began.retry and len(p.live) == 1
    bench.hand_over(p, d, KEY, asked)
    exported = bench.ask(p, port.Export(*KEY))
    assert bench.ask(d, port.Load("s", 1, asked, exported.manifest, exported.parts)).why == "no memory"
    outputs = [bench.run(d, KEY).outputs[0] for _ in range(5)]
    assert outputs[-1].reason == "preempted" or any(out.reason == "preempted" for out in outputs)
    assert d.cells.pool.counts["live"] == 0 and d.cells.adds_up and p.cells.adds_up


def test_a_drop_waits_for_the_step_and_its_rows_are_fenced():
    bench = Bench()
    p, d, asked = bench.prefill(), bench.decode(), spec(100, 20)
    bench.take_in(p, KEY, asked)
    bench.hand_over(p, d, KEY, asked)
    said = bench.said["d"]
    said.clear()
    d.do(port.RunDecode(99, (KEY,)))
    d.do(port.Drop(*KEY))
    assert d.cells.pool.counts["fenced"] == 1
    bench.drain()
    done, dropped = said
    assert isinstance(dropped, port.Dropped) and isinstance(done, port.DecodeDone) and done.outputs == ()
    assert d.cells.pool.counts["free"] == d.shape.blocks


def test_bad_rows_hung_steps_and_dead_ranks():
    bench = Bench()
    p, d, asked = bench.prefill(), bench.decode(ranks=3, fewest=2), spec(100, 20)
    p.nan = 1
    _, done = bench.take_in(p, KEY, asked)
    assert done.failed == ((*KEY, "not a number"),)
    assert bench.ask(p, port.Export(*KEY)).manifest.replay_tail  # nothing was sampled
    bench.hand_over(p, d, KEY, asked)
    d.nan = 1
    assert bench.run(d, KEY).outputs[0].error == "not a number"
    d.hang = True
    assert bench.run(d, KEY) is None and d.running and d.owes
    bench.said["d"].clear()
    assert d.kill_rank(0) and not d.kill_rank(0)
    bench.drain()
    assert bench.said["d"] == [port.RankDied(0)] and not d.live
    assert d.cells.pool.counts["free"] == d.shape.blocks, "a step that never ended keeps nothing"
    assert bench.run(d, KEY) is None, "no step without all ranks"
    reformed = bench.ask(d, port.Reform(1))
    assert (reformed.ranks, reformed.why) == (2, "")
    d.kill_rank(1)
    bench.drain()
    assert bench.ask(d, port.Reform(2)).why
    d.stop()
    assert bench.run(d, KEY) is None


def test_commands_for_another_engine_are_noticed():
    bench = Bench()
    bench.prefill().do(port.RunDecode(1, ()))
    bench.decode().do(port.RunPrefill(1, ()))
    assert [invariant for invariant, _ in bench.checks.wrongs] == [8, 8]
