"""The command itself."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.spec import point, show
from bench.spec import trials as trials_file
from bench.spec.ladder import climb
from bench.spec.measure import measure
from bench.spec.replay import curve_of, replay
from orchestrator.balance.cost_curve import CostCurve
from orchestrator.commands.paths import find_model
from orchestrator.evaluate.prompts import conversation_prompts
from orchestrator.evaluate.speculate import Trial, speculate
from orchestrator.model.drafter import Drafter
from orchestrator.model.load import load_model
from orchestrator.model.presets import v41_flash_rank, v41_nano
from orchestrator.model.random_weights import random_model
from orchestrator.text.tokenizer import load_tokenizer

REPLAYED = (8, 16, 32, 60, 72, 96, 128)
DRAFT_SHARE = 3 / 40  # stages over layers
RECORDED_TOKENS = 96
CODE = (
    "def fibonacci(n):\n    ", "import os\nimport sys\n\n\ndef main():\n", "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n    print(", "def test_sum():\n    assert ", "with open(path) as file:\n    ",
    "try:\n    value = int(", "if __name__ == ",
)  # fmt: skip


LONGEST = 520  # tokens of a prompt of a climb, at least: tables of blocks keep one width from there to 2,048


@dataclass(frozen=True)
class Wanted:
    """What to measure.

    `sequences` are timed one engine each, on a GPU one engine for all; `rank` also runs `v41-flash-rank` with the
    model's acceptance, or where `small` v41-nano in its place. `trials` is where recorded acceptance is kept; `tokens`
    of a request, `steps` a run of a climb.
    """

    model: str | None
    device: str
    sequences: list[int]
    tokens: int
    temperature: float
    curve: Path | None = None
    trials: Path | None = None
    rank: bool = False
    small: bool = False
    steps: int = 16


def run(console: Console, wanted: Wanted, out: Path | None, page: Path | None, shown: Path | None) -> None:
    """Measure and replay, or load; print, save, draw."""
    points, about = point.load(shown) if shown is not None else _measured(console, wanted)
    for source in point.SOURCES:
        if any(p.source == source for p in points):
            console.print(source)
            for line in show.table(points, source):
                console.print(line, markup=False, highlight=False)
            if source != "timed" and len({p.sequences for p in points if p.source == source}) > 1:
                console.print(" ".join(show.shape(points, source)), markup=False, highlight=False)
    if out is not None:
        point.save(out, points, about)
        console.print(f"written: {out}", highlight=False)
    if page is not None:
        picture = page.with_suffix(".png")
        show.draw(points, picture)
        page.write_text(show.page(points, about, picture.name), encoding="utf-8")
        console.print(f"written: {page}", highlight=False)


def _measured(console: Console, wanted: Wanted) -> tuple[list[point.Point], dict[str, Any]]:
    times = None if wanted.curve is None else curve_of(wanted.curve)  # a wrong file should not cost a run
    folder = find_model(wanted.model)
    tokenizer, device = load_tokenizer(folder), wanted.device
    prompts = [p.tokens for p in conversation_prompts(tokenizer)] + [tokenizer.encode(text) for text in CODE]
    prompts = [list(p) for p in prompts[::2] + prompts[1::2]]  # both kinds among the first few
    about = {
        "model": folder.name, "temperature": wanted.temperature, "prompts": len(prompts),
        "device": torch.cuda.get_device_name() if device == "cuda" else "a CPU",
        "curve": None if wanted.curve is None else wanted.curve.name, "draft_share": DRAFT_SHARE,
        "torch": torch.__version__, "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    points: list[point.Point] = []
    trials = _trials(console, wanted, folder, prompts) if wanted.rank or times is not None else []

    def note(found: point.Point) -> None:
        line = f"{found.source} {found.sequences} {found.policy}: {found.tokens_per_second:,.0f} tokens/s, "
        console.print(f"{line}{found.step_ms:.2f} ms, idle {found.bubble:.2%}", markup=False, highlight=False)

    if wanted.rank:
        curve = _rank(points, wanted, trials, note)
        about["rank"] = "v41-nano" if wanted.small else "v41-flash-rank"
        if curve is not None:
            about["rank_curve"] = asdict(curve)
            times = times or curve
            about["curve"] = about["curve"] or f"{about['rank']} on {about['device']}"
    if wanted.sequences and not wanted.rank:
        model = load_model(folder, device=device)
        if not model.config.num_nextn_predict_layers:
            raise ValueError(f"model: got {folder.name}, which has no draft stages, allowed is one with some")
        if device == "cuda":
            made, curve = climb(
                model, _long(prompts), wanted.sequences, wanted.steps, wanted.temperature, note=note
            )  # fmt: skip
            points += made
            about["timed_curve"] = None if curve is None else asdict(curve)
        else:
            for count in wanted.sequences:
                with console.status(f"{count} sequences"):
                    points += measure(model, prompts, count, wanted.tokens, wanted.temperature)
    if times is not None:
        for count in REPLAYED:
            points += replay(trials, times, count, draft_share=DRAFT_SHARE)
    about["load"] = round(os.getloadavg()[0] / (os.cpu_count() or 1), 1)
    return points, about


def _trials(console: Console, wanted: Wanted, folder: Path, prompts: list[list[int]]) -> list[Trial]:
    """Recorded on a CPU, or read where they were kept."""
    if wanted.trials is not None and wanted.trials.is_file():
        found, about = trials_file.load(wanted.trials)
        asked = {"model": folder.name, "temperature": wanted.temperature}
        if about != asked:
            raise ValueError(f"trials: got a recording of {about}, allowed is one of {asked}")
        return found
    with console.status("recording acceptance"):
        model = load_model(folder)
        found = speculate(
            model, Drafter(model), prompts, RECORDED_TOKENS, temperature=wanted.temperature
        ).trials  # fmt: skip
    if wanted.trials is not None:
        trials_file.save(wanted.trials, found, folder.name, wanted.temperature)
    return found


def _rank(
    points: list[point.Point], wanted: Wanted, trials: list[Trial], note: Callable[[point.Point], None]
) -> CostCurve | None:  # fmt: skip
    config = v41_nano() if wanted.small else v41_flash_rank()
    device = torch.device(wanted.device)
    model = random_model(config, device=device, dense="library")
    rng = random.Random(7)
    length = 20 if wanted.small else LONGEST
    prompts = [[rng.randrange(3, config.vocab_size - 800) if not wanted.small else rng.randrange(3, 400)
                for _ in range(length)] for _ in range(max(wanted.sequences))]  # fmt: skip
    made, curve = climb(
        model, prompts, wanted.sequences, wanted.steps, wanted.temperature,
        trials=trials, dense="library", source="imposed", note=note,
    )  # fmt: skip
    points += made
    return curve


def _long(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of at least `LONGEST` tokens: each one with those behind it in front."""
    made = []
    for i in range(len(prompts)):
        text, k = list(prompts[i]), i
        while len(text) < LONGEST:
            k += 1
            text = prompts[k % len(prompts)] + text
        made.append(text[-LONGEST:])
    return made
