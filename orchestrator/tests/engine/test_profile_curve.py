"""An engine that measures its own cost curve, and keeps it."""

from __future__ import annotations

import pytest

from orchestrator.engine import curve_cache
from orchestrator.engine.cost_profile import profile, record_shapes
from orchestrator.engine.request import SamplingParams
from orchestrator.engine.step_inputs import sizes


def test_a_profile_covers_every_step_and_leaves_no_row(kit, nano):
    engine = kit.engine_of(nano, max_num_seqs=2, num_blocks=6)
    curve = profile(engine)
    assert list(curve.rows) == sizes(12) and list(curve.draft_requests) == [1, 2]
    assert all(a <= b for a, b in zip(curve.seconds, curve.seconds[1:], strict=False))
    assert not any(p.main.any() or p.index.any() for p in engine.cache.pools.values())
    request = {"r": ([5, 9, 3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))}
    assert kit.run(engine, request) == kit.run(kit.engine_of(nano, speculation="off"), request)
    engine.add("r", [1], SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="engine: got one with requests"):
        profile(engine)


def test_steps_from_graphs_are_measured_as_such(kit, nano):
    class Graphs:
        def __init__(self):
            self.rows, self.failed, self.seen = [1, 4, 12], False, []

        def run(self, inputs, total):
            assert int(inputs.limits.sum()) == total == int(inputs.budget)
            self.seen.append((len(inputs.slots), total))

    engine = kit.engine_of(nano, max_num_seqs=2, num_blocks=6, mode="in order")
    graphs = engine.pipeline.graphs = Graphs()
    curve = profile(engine)
    assert curve.staircase and curve.rows == (1, 4, 12)
    assert set(graphs.seen) == {(1, 0), (1, 3), (2, 10)}


def test_shapes_of_so_many_requests_are_recorded(kit, nano):
    class Graphs:
        def __init__(self):
            self.requests, self.rows, self.failed, self.seen = [1, 2, 4], [1, 2, 4, 6, 12, 24], False, []

        def run(self, inputs, total):
            assert int(inputs.limits.sum()) == total == int(inputs.budget)
            self.seen.append((len(inputs.slots), len(inputs.slots) + total))

    engine = kit.engine_of(nano, max_num_seqs=4, num_blocks=12, mode="in order")
    graphs = engine.pipeline.graphs = Graphs()
    record_shapes(engine, 2)
    assert graphs.seen == [(2, 2), (2, 4), (2, 6), (2, 12)]
    graphs.seen.clear()
    record_shapes(engine, 3)
    assert graphs.seen == [(3, 4), (3, 6), (3, 12), (3, 18)], "the last size is larger than all its drafts"
    with pytest.raises(ValueError, match="requests: got 5, allowed is 1 to 4"):
        record_shapes(engine, 5)


def test_a_curve_is_measured_once(kit, nano, tmp_path, monkeypatch):
    engine = kit.engine_of(nano, max_num_seqs=2, num_blocks=6)
    first = curve_cache.use_curve(engine, tmp_path)
    monkeypatch.setattr(curve_cache, "profile", lambda engine: pytest.fail("measured again"))
    again = kit.engine_of(nano, max_num_seqs=2, num_blocks=6)
    assert curve_cache.use_curve(again, tmp_path) == first == again.speculator.budget.curve
    assert curve_cache.key_of(again) != curve_cache.key_of(kit.engine_of(nano, max_num_seqs=3, num_blocks=6))
    assert curve_cache.use_curve(kit.engine_of(nano, speculation=3), tmp_path) is None
    assert curve_cache.use_curve(kit.engine_of(nano, speculation="off"), tmp_path) is None
