"""The profile bench on a small model: the trace holds steps, ops and their overlap."""

import json

import pytest

import mla_fp4
from bench.main import run
from bench.profile.trace import read
from orchestrator.engine.ranges import named, ranges_on


def test_a_trace_shows_steps_ops_and_overlap(tmp_path, capsys):
    path = tmp_path / "trace.json"
    words = ["--model", "v41-nano", "--sequences", "2", "--context", "20", "--steps", "3", "--out", str(path)]
    assert run(["profile", *words]) == 0
    found = read(path)
    assert len(found.steps) >= 4 and {name[0] for name in found.steps} == {"F", "S"}
    assert found.ops["mla_fp4.sparse_attention"] > 0 and found.ops["dspark_kernels.verify"] >= 2
    threads = {e["tid"] for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "user_annotation"}
    assert len(threads) >= 2, "the host and the device have a thread each"
    assert found.overlapped >= 1
    assert "host parts that overlap device work" in capsys.readouterr().out


def test_on_a_gpu_its_own_spans_count(tmp_path):
    def span(category, name, start, length):
        return {"cat": category, "name": name, "ts": start, "dur": length}

    events = [
        span("user_annotation", "launch F 2", 10, 5), span("user_annotation", "F 2", 11, 3),
        span("user_annotation", "plan", 100, 5), span("gpu_user_annotation", "F 2", 90, 20),
        span("kernel", "some_kernel", 91, 4),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read(path)
    assert found.steps == ["F 2"] and found.kernels["some_kernel"] == 1
    assert found.overlapped == 1, "the plan runs beside the device, starting the pass does not"


def test_ranges_leave_the_ops_as_they_were():
    before = mla_fp4.norm_rope
    assert named("x") is named("y")
    with pytest.raises(RuntimeError, match="stop"), ranges_on():
        assert mla_fp4.norm_rope is not before and named("x") is not named("y")
        raise RuntimeError("stop")
    assert mla_fp4.norm_rope is before and named("x") is named("y")


def test_refuses(tmp_path, capsys):
    assert run(["profile", "--speculation", "much"]) == 2
    assert "--speculation" in capsys.readouterr().out
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(ValueError, match="no trace"):
        read(other)
