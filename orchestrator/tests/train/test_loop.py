"""Stopping and resuming gives the weights of a run in one piece; time, signals and bad losses end a run in order."""

from __future__ import annotations

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from orchestrator.train import loop
from orchestrator.train.batches import Batches
from orchestrator.train.loop import TrainingFailed, train
from orchestrator.train.optimizer import Optimizer
from orchestrator.train.snapshot import load_state

PHASES = (SimpleNamespace(until=0.5, length=16, batch=4), SimpleNamespace(until=1.0, length=32, batch=2))


@pytest.fixture
def go(dataset, tmp_path):
    """`go(name, model, steps)` trains with files of that name and returns the result."""

    def start(name, model, steps=40, **more):
        options = {"lr": 0.02, "seed": 1, "every": 5, **more}
        files = {"state_path": tmp_path / f"{name}.state", "log_path": tmp_path / f"{name}.jsonl"}
        source = Batches(dataset, 1, "cpu")
        return train(model, Optimizer(model, lr=0.02), source, PHASES, steps, **files, **options)

    return start


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def interrupt_at(step):
    """Sends this process SIGTERM when the model computes that step."""
    return lambda now: os.kill(os.getpid(), signal.SIGTERM) if now == step else None


def test_stopped_and_resumed_is_the_same_run(go, tmp_path, new_model):
    whole = new_model()
    result = go("whole", whole)
    assert result.done and result.step == 40 and result.tokens == 20 * 64 + 20 * 64
    stops = (13, 14, 27)  # in the middle of an interval, one step on, in the next phase
    for stop in stops:
        model = new_model(seed=stop)  # other weights, which the state replaces (but for the first call)
        if stop == stops[0]:
            model = new_model()
        model.before_step = interrupt_at(stop - 1)
        result = go("pieces", model)
        assert result.stopped == "signal" and result.step == stop
    last = new_model(seed=9)
    assert go("pieces", last).done
    for name, value in whole.values.items():
        assert torch.equal(value, last.values[name]), name
    one, other = load_state(tmp_path / "whole.state"), load_state(tmp_path / "pieces.state")
    assert one[0].keys() == other[0].keys() and all(torch.equal(one[0][n], other[0][n]) for n in one[0])
    assert one[1]["tokens"] == other[1]["tokens"]


def test_log(go, tmp_path, new_model):
    seen = []
    evaluate = lambda step: seen.append(step) or {"ce": 1.0}  # noqa: E731
    result = go("a", new_model(), steps=42, evaluate=evaluate, evaluate_every=20)
    log = lines(tmp_path / "a.jsonl")
    assert seen == [20, 40, 42] and [line["step"] for line in log if "evaluation" in line] == seen
    log = [line for line in log if "loss" in line]
    assert [line["step"] for line in log] == [5, 10, 15, 20, 21, 25, 30, 35, 40, 42]  # 21: a phase ends there
    assert [line["phase"] for line in log] == [0] * 5 + [1] * 5
    keys = {"step", "phase", "tokens", "loss", "ce", "lr", "gradient_norm", "tokens_per_second", "elapsed"}
    assert all(set(line) == keys for line in log)
    assert log[3]["tokens"] == 20 * 64 and log[-1]["tokens"] == result.tokens
    assert log[-1]["loss"] < log[0]["loss"] and log[-1]["lr"] < log[4]["lr"] == 0.02
    assert result.loss == pytest.approx(log[-1]["loss"], abs=1e-4)


def test_lines_behind_the_state_are_dropped(go, tmp_path, new_model):
    model = new_model()
    model.before_step = interrupt_at(11)
    go("a", model)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"step": 15, "loss": 1}\n{"step": 20, "lo')  # as a crash leaves it
    go("a", new_model())
    steps = [line["step"] for line in lines(tmp_path / "a.jsonl")]
    assert steps == [5, 10, 12, 15, 20, 25, 30, 35, 40]


def test_steps_may_change(go, new_model):
    model = new_model()
    model.before_step = interrupt_at(11)
    assert go("a", model, steps=40).step == 12
    assert go("a", new_model(), steps=20).step == 20
    again = new_model(seed=4)
    result = go("a", again, steps=20)
    assert result.done and result.step == 20 and result.tokens > 0


def test_stops_in_time(go, tmp_path, new_model):
    model = new_model()
    model.before_step = lambda step: time.sleep(0.05)
    begin = time.monotonic()
    result = go("a", model, steps=1000, minutes=2 / 60)
    assert result.stopped == "time" and 0 < result.step < 45 and time.monotonic() - begin < 2
    assert load_state(tmp_path / "a.state")[1]["step"] == result.step


def test_some_bad_losses_are_skipped(go, tmp_path, new_model):
    model = new_model()
    model.fail_at = (7, 22)
    result = go("a", model)
    assert result.done and result.skipped == 2
    assert all(line["loss"] is not None for line in lines(tmp_path / "a.jsonl"))
    assert all(torch.isfinite(value).all() for value in model.values.values())


def test_nothing_but_bad_losses_ends_the_run(go, tmp_path, monkeypatch, new_model):
    monkeypatch.setattr(loop, "BAD_INTERVALS", 3)
    model = new_model()
    model.before_step = interrupt_at(9)
    go("a", model)
    model = new_model()
    model.fail_at = range(10, 1000)
    with pytest.raises(TrainingFailed, match=r"no finite loss in the last 3 lines .*step 25.*is of step 10"):
        go("a", model)
    assert load_state(tmp_path / "a.state")[1]["step"] == 10
    assert lines(tmp_path / "a.jsonl")[-1]["loss"] is None


def test_handlers_are_restored(go, new_model):
    before = signal.getsignal(signal.SIGTERM)
    go("a", new_model(), steps=3)
    assert signal.getsignal(signal.SIGTERM) is before


def test_refusals(go, dataset, tmp_path, new_model):
    go("a", new_model(), steps=2)
    with pytest.raises(ValueError, match="seed: got 2, allowed is 1, with which"):
        go("a", new_model(), seed=2)
    model = new_model()
    model.values["extra"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"a\.state: is the state of another model \(extra\)"):
        go("a", model)
    with pytest.raises(ValueError, match="steps, every: got 0, 5"):
        go("b", new_model(), steps=0)
    (tmp_path / "a.state").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"a\.state: is no state of a training run"):
        go("a", new_model())
