"""The command itself."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.spec import point, show
from bench.spec.measure import measure
from bench.spec.replay import curve_of, replay
from orchestrator.commands.paths import find_model
from orchestrator.evaluate.prompts import conversation_prompts
from orchestrator.evaluate.speculate import speculate
from orchestrator.model.drafter import Drafter
from orchestrator.model.load import load_model
from orchestrator.text.tokenizer import load_tokenizer

REPLAYED = (8, 16, 32, 60, 72, 96, 128)
DRAFT_SHARE = 3 / 40  # stages over layers
RECORDED_TOKENS = 96
CODE = (
    "def fibonacci(n):\n    ", "import os\nimport sys\n\n\ndef main():\n", "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n    print(", "def test_sum():\n    assert ", "with open(path) as file:\n    ",
    "try:\n    value = int(", "if __name__ == ",
)  # fmt: skip


def run(
    console: Console, model: str | None, device: str, sequences: list[int], tokens: int, temperature: float,
    curve: Path | None, out: Path | None, page: Path | None, shown: Path | None,
) -> None:  # fmt: skip
    """Measure and replay, or load; print, save, draw."""
    if shown is not None:
        points, about = point.load(shown)
    else:
        points, about = _measured(console, model, device, sequences, tokens, temperature, curve)
    for source in ("timed", "replayed"):
        if any(p.source == source for p in points):
            console.print(source)
            for line in show.table(points, source):
                console.print(line, markup=False, highlight=False)
    if any(p.source == "replayed" for p in points):
        console.print(" ".join(show.shape(points)), markup=False, highlight=False)
    if out is not None:
        point.save(out, points, about)
        console.print(f"written: {out}", highlight=False)
    if page is not None:
        picture = page.with_suffix(".png")
        show.draw(points, picture)
        page.write_text(show.page(points, about, picture.name), encoding="utf-8")
        console.print(f"written: {page}", highlight=False)


def _measured(
    console: Console, name: str | None, device: str, sequences: list[int], tokens: int, temperature: float,
    curve: Path | None,
) -> tuple[list[point.Point], dict[str, Any]]:  # fmt: skip
    times = None if curve is None else curve_of(curve)  # a wrong file should not cost a run
    folder = find_model(name)
    model, tokenizer = load_model(folder, device=device), load_tokenizer(folder)
    if not model.config.num_nextn_predict_layers:
        raise ValueError(f"model: got {folder.name}, which has no draft stages, allowed is one with some")
    prompts = [p.tokens for p in conversation_prompts(tokenizer)] + [tokenizer.encode(text) for text in CODE]
    prompts = prompts[::2] + prompts[1::2]  # both kinds among the first few
    points: list[point.Point] = []
    for count in sequences:
        with console.status(f"{count} sequences"):
            points += measure(model, prompts, count, tokens, temperature)
    if times is not None:
        with console.status("recording acceptance"):
            if device != "cpu":  # the recorder runs there
                model = load_model(folder)
            trials = speculate(model, Drafter(model), prompts, RECORDED_TOKENS, temperature=temperature).trials
        for count in REPLAYED:
            points += replay(trials, times, count, draft_share=DRAFT_SHARE)
    about = {
        "model": folder.name, "temperature": temperature, "prompts": len(prompts),
        "device": torch.cuda.get_device_name() if device == "cuda" else "a CPU",
        "curve": None if curve is None else curve.name, "draft_share": DRAFT_SHARE,
        "load": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1),
        "torch": torch.__version__, "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    return points, about
