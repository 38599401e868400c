"""The speculation bench: policies over given trials, curves from files, and the command on a small model."""

import json

import pytest

from bench.main import run
from bench.spec import point, show
from bench.spec.replay import curve_of, replay, split
from orchestrator.balance.cost_curve import CostCurve
from orchestrator.evaluate.speculate import Trial

FLAT = CostCurve((1, 600), (1.0, 1.0))
STEEP = CostCurve((1, 600), (1.0, 600.0))


def trials(kept: int, confidence: float) -> list[Trial]:
    return [Trial(r, kept, 5, False, (0.0,) * 5, (confidence,) * 5) for r in range(3) for _ in range(4)]


def by_policy(points):
    return {p.policy: p for p in points}


def test_free_rows_are_all_verified_and_dear_ones_are_not():
    free = by_policy(replay(trials(5, 1.0), FLAT, 8))
    assert free["variable"] == free["fixed 5"].__class__(**{**vars(free["fixed 5"]), "policy": "variable"})
    assert free["fixed 5"].tokens_per_second == 48 and free["none"].tokens_per_second == 8
    dear = by_policy(replay(trials(0, 0.1), STEEP, 8))
    assert dear["variable"].verified == 1.0 and dear["variable"].accepted == 1.0
    assert dear["variable"].tokens_per_second == dear["none"].tokens_per_second > dear["fixed 5"].tokens_per_second


def test_the_split_is_the_kernels():
    import torch

    import dspark_kernels

    confidences = torch.rand(7, 5, generator=torch.Generator().manual_seed(1)).mul(4).round().div(4)
    for total in range(36):
        schedule = dspark_kernels.schedule(
            confidences, torch.zeros(7, 6, dtype=torch.int64), torch.zeros(7, dtype=torch.int64),
            torch.full((7,), 5, dtype=torch.int32), total, 7 + total,
        )  # fmt: skip
        assert split(confidences.tolist(), total) == schedule.lengths.tolist()


def test_curves_from_files(tmp_path):
    rank = tmp_path / "rank.json"
    measured = (("decode", 8, 9e3), ("prefill", 1, 1e6), ("decode", 4, 6e3))
    steps = [{"kind": kind, "sequences": count, "device_us": us} for kind, count, us in measured]
    rank.write_text(json.dumps({"steps": steps}))
    assert curve_of(rank) == CostCurve((4, 8), (0.006, 0.009))
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({"rows": [1, 2], "seconds": [1.0, 2.0]}))
    assert curve_of(plain).rows == (1, 2)
    for text in ("[]", "{}", "x", '{"rows": [2, 1], "seconds": [1, 2]}'):
        plain.write_text(text)
        with pytest.raises(ValueError):
            curve_of(plain)


def test_command_times_and_replays(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    curve, out, page = tmp_path / "rank.json", tmp_path / "spec.json", tmp_path / "spec.md"
    curve.write_text(json.dumps({"rows": [8, 900], "seconds": [0.01, 0.1]}))
    words = ["spec", "--model", "v41-nano", "--sequences", "2", "--tokens", "16"]
    assert run([*words, "--curve", str(curve), "--out", str(out), "--page", str(page)]) == 0
    points, about = point.load(out)
    timed = by_policy(p for p in points if p.source == "timed")
    assert set(timed) == set(point.POLICIES) and all(p.tokens_per_second > 0 for p in timed.values())
    assert timed["none"].verified == 1.0 < timed["variable"].verified <= timed["fixed 5"].verified <= 6.0
    assert {p.sequences for p in points if p.source == "replayed"} >= set(show.PUBLISHED)
    text = page.read_text()
    assert "## Timed on a CPU" in text and "## Replayed" in text and about["model"] == "v41-nano"
    assert page.with_suffix(".png").stat().st_size > 1000
    again = tmp_path / "again.md"
    assert run(["spec", "--from", str(out), "--page", str(again)]) == 0
    assert again.read_text() == text.replace("spec.png", "again.png")


def test_refuses(tmp_path, capsys):
    assert run(["spec", "--from", str(tmp_path / "none.json")]) == 2
    assert "got no figures" in capsys.readouterr().out.replace("\n", " ")
