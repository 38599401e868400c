"""Acceptance that is imposed on steps that are run: it is the recorded one, and the engine around it is whole."""

import pytest
import torch

from bench.main import run
from bench.spec import ladder, point
from bench.spec import trials as trials_file
from bench.spec.ladder import climb, engine_for
from bench.spec.point import POLICIES
from bench.spec.replayed_engine import Record, impose
from orchestrator.engine.cost_profile import record_shapes
from orchestrator.engine.request import SamplingParams
from orchestrator.evaluate.speculate import Trial
from orchestrator.model.presets import v41_nano
from orchestrator.model.random_weights import random_model

CPU = torch.device("cpu")
PROMPTS = [[5, 7, 11, 13], [17, 19, 23]]


@pytest.fixture(scope="module")
def model():
    return random_model(v41_nano(), device=CPU, dense="library")


def trials(*kept):
    return [Trial(0, k, 5, False, (), (0.9, 0.8, 0.7, 0.6, 0.5)) for k in kept]


def decoding(model, recorded):
    engine = engine_for(model, PROMPTS, 2, 200, drafts=True, dense="library")
    impose(engine, recorded)
    engine.speculator.fixed = True
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), list(prompt), SamplingParams(temperature=1.0, max_tokens=150, ignore_eos=True))
    while engine.pipeline.clock.steps < 3:
        engine.step()
    return engine


def test_as_many_drafts_stand_as_were_recorded(model):
    engine = decoding(model, trials(0, 3, 5))
    found = []
    for _ in range(9):
        before = [len(s.tokens) for s in engine.scheduler.running]
        engine.step()
        found.append([len(s.tokens) - b - 1 for s, b in zip(engine.scheduler.running, before, strict=True)])
    for line in zip(*found, strict=True):
        start = [0, 3, 5].index(line[0])
        assert list(line) == [[0, 3, 5][(start + i) % 3] for i in range(9)]
    for sequence in engine.scheduler.running:
        assert sequence.confidence == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])
        assert all(0 <= t < 512 for t in sequence.tokens)


def test_accepted_tokens_are_the_models_drafts(model):
    engine = decoding(model, trials(5))
    for _ in range(4):
        drafts = [list(s.drafts) for s in engine.scheduler.running]
        ends = [len(s.tokens) for s in engine.scheduler.running]
        engine.step()
        for sequence, mine, end in zip(engine.scheduler.running, drafts, ends, strict=True):
            assert sequence.tokens[end : end + 5] == mine and len(sequence.tokens) == end + 6


def test_refuses(model, monkeypatch):
    with pytest.raises(ValueError, match="trials: got none"):
        Record.of([], 5, 3, CPU)
    with pytest.raises(ValueError, match="trials: got 5 drafts"):
        Record.of(trials(1), 6, 3, CPU)
    with pytest.raises(ValueError, match="engine: got one without drafts"):
        impose(engine_for(model, PROMPTS, 2, 20, drafts=False, dense="library"), trials(1))
    monkeypatch.setattr(ladder, "MOST_A_STEP", 2)
    monkeypatch.setattr(ladder, "_SPARE", 1)
    with pytest.raises(ValueError, match="steps: got too many"):  # six tokens a step where two have room
        ladder.climb(model, PROMPTS, [1], 8, 1.0, trials=trials(5), dense="library")


def test_a_climb_has_every_point_and_measures_the_overlap(model):
    points, curve = climb(model, PROMPTS, [1, 2], 3, 1.0, trials=trials(1, 2), dense="library", source="imposed")
    assert [(p.sequences, p.policy) for p in points] == [(n, policy) for n in (1, 2) for policy in POLICIES]
    assert curve is not None and curve.draft_requests
    for p in points:
        assert p.device_ms > 0 and 0 <= p.held <= p.bubble + 0.05 and p.host_ms > 0
        assert p.accepted == 1.0 if p.policy == "none" else 1.0 <= p.accepted <= p.verified <= 6.0
    assert all(p.verified == 6.0 for p in points if p.policy == "fixed 5")


def test_shapes_are_recorded_for_engines_with_graphs_only(model):
    engine = engine_for(model, PROMPTS, 2, 20, drafts=True, dense="library")
    record_shapes(engine, 2)  # a CPU has none
    assert engine.pipeline.graphs is None and not engine.has_work


def test_recordings_are_kept(tmp_path):
    path = tmp_path / "trials.json"
    trials_file.save(path, trials(2, 4), "v41-nano", 1.0)
    found, about = trials_file.load(path)
    assert found == trials(2, 4) and about == {"model": "v41-nano", "temperature": 1.0}
    path.write_text('{"trials": [{"kept": 1}]}')
    with pytest.raises(ValueError, match="got no recorded verifications"):
        trials_file.load(path)


def test_command_runs_a_rank(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    kept, out, page = tmp_path / "trials.json", tmp_path / "spec.json", tmp_path / "spec.md"
    trials_file.save(kept, trials(0, 1, 2), "v41-nano", 1.0)
    words = ["spec", "--rank", "--small", "--model", "v41-nano", "--sequences", "1,2", "--steps", "3"]
    assert run([*words, "--trials", str(kept), "--out", str(out), "--page", str(page)]) == 0
    points, about = point.load(out)
    assert {p.source for p in points} == {"imposed", "replayed"} and about["rank"] == "v41-nano"
    text = page.read_text()
    assert "## Run: v41-nano on a CPU" in text and "*Held*" in text and "as long as was measured" in text
    other = ["--trials", str(kept), "--temperature", "0.5"]
    assert run([*words, *other]) == 2
    assert "got a recording of" in capsys.readouterr().out.replace("\n", " ")
    assert run(["spec", "--rank"]) == 2 and "--small" in capsys.readouterr().out
