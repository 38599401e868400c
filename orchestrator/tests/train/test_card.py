"""Cards and curves say what they were given, leave out what they were not, and stay small."""

from __future__ import annotations

import json

import pytest

from orchestrator.train.card import write_card
from orchestrator.train.curves import plot_curves

FACTS = {
    "name": "v41-mini",
    "summary": "A small model.",
    "header": {"license": "apache-2.0", "language": ["en", "code"]},
    "sizes": {"parameters": 29981074},
    "data": {
        "train": {"documents": 12, "bytes": 3400, "tokens": 1000},
        "heldout": {"documents": 1, "bytes": 34, "tokens": 10, "names": ["typing.py"]},
        "kinds": {"code": 900},
        "sources": [{"name": "a|b", "version": "1", "licence": "MIT", "origin": "wheel", "documents": 12, "tokens": 9}],
    },
    "training": {
        "command": "fathom train v41-mini",
        "hardware": "one GPU",
        "stages": [
            {"name": "backbone", "steps": 9000, "tokens": 5, "seconds": 600, "phases": [{"until": 0.5, "batch": 32}]}
        ],
    },
    "results": {"bits a byte": {"value": 1.23456789, "stderr": 0.01}, "recall": {"value": 0.9, "note": "top 64"}},
    "limits": ["It knows little."],
}


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "backbone.jsonl"
    with path.open("w") as file:
        for step in range(20, 40001, 20):
            line = {"step": step, "phase": step // 9000, "tokens": step * 10, "loss": 5 - step / 10000, "ce": 4.0}
            file.write(json.dumps({**line, "lr": 1e-3, "tokens_per_second": 1e5, "elapsed": 1.0}) + "\n")
            if step % 10000 == 0:
                file.write(json.dumps({"step": step, "tokens": step * 10, "evaluation": {"ce": 3.5}}) + "\n")
    return path


def test_whole_card(tmp_path, log):
    text = write_card(tmp_path / "model", FACTS | {"logs": {"backbone": log}}).read_text()
    assert text.startswith(
        "---\nlicense: apache-2.0\nlanguage:\n  - en\n  - code\n---\n\n# v41-mini\n\nA small model.\n"
    )
    assert "| parameters | 29,981,074 |" in text and r"| a\|b | 1 | MIT | wheel | 12 | 9 |" in text
    assert "| train | 12 | 3,400 | 1,000 |" in text and "| code | 900 |" in text and "typing.py" in text
    assert "| backbone | 9,000 | 5 | 10 min |" in text and "| 0.5 | 32 |" in text
    assert "| bits a byte | 1.2346 | 0.01 |  |" in text and "| recall | 0.9 |  | top 64 |" in text
    assert "- It knows little." in text
    rows = [line for line in text.splitlines() if line.endswith("| 0.001 | 1e+05 |")]
    assert len(rows) == 20 and rows[0].startswith("| 20 | 0 |") and rows[-1].startswith("| 40,000 | 4 |")
    copied = [json.loads(line) for line in (tmp_path / "model/training-log.jsonl").read_text().splitlines()]
    assert len(copied) == 2004 and copied[0] == {"stage": "backbone", **json.loads(log.read_text().splitlines()[0])}


def test_nothing_is_made_up(tmp_path):
    text = write_card(tmp_path, {"name": "m", "summary": "s"}).read_text()
    assert text == "# m\n\ns\n" and [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_card_refuses(tmp_path):
    with pytest.raises(ValueError, match="facts: got no summary"):
        write_card(tmp_path / "model", {"name": "m"})
    with pytest.raises(ValueError, match="facts: got header entry licence"):
        write_card(tmp_path / "model", {"name": "m", "summary": "s", "header": {"licence": "MIT"}})
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_curves(tmp_path, log, ending):
    pytest.importorskip("matplotlib")
    path = plot_curves(log, tmp_path / f"curves.{ending}", title="backbone", bytes_per_token=3.4)
    assert 5_000 < path.stat().st_size < 100_000
    again = plot_curves(log, tmp_path / f"again.{ending}", title="backbone", bytes_per_token=3.4)
    assert path.read_bytes() == again.read_bytes()
    with pytest.raises(ValueError, match="has no lines with length"):
        plot_curves(log, path, title="drafter", measure="length")
    with pytest.raises(ValueError, match=r"out: got a\.pdf"):
        plot_curves(log, tmp_path / "a.pdf", title="x")
