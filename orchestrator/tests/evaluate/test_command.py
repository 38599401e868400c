"""`fathom eval` from options to files; the measuring itself is tested elsewhere."""

from __future__ import annotations

import json

import pytest

from orchestrator.commands.errors import UsageError
from orchestrator.commands.eval import EvalOptions, evaluate
from orchestrator.evaluate.sizes import SIZES, Sizes


def test_a_run_writes_what_it_is_asked_for(nano_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        SIZES, "quick", Sizes(bits=1, replay={}, prompts=1, questions=1, output=4, recall={}, needle={}, window=256)
    )
    monkeypatch.setattr("orchestrator.commands.eval.load_reference", lambda folder: None)
    options = EvalOptions(model=str(nano_folder), only="bits", quick=True, json=tmp_path / "r.json")
    assert evaluate(options) == 0
    out, err = capsys.readouterr()
    assert "Bits per byte" in out and "bits: " in err
    assert json.loads((tmp_path / "r.json").read_text())["figures"]["bits_engine"]["samples"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EvalOptions(only="bits,speed"), "--only: got 'speed'"),
        (EvalOptions(quick=True, thorough=True), "--quick, --thorough"),
        (EvalOptions(model="no such model"), "No model"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        evaluate(options)
