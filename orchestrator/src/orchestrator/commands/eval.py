"""`fathom eval`: measure a model's quality."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.errors import UsageError
from orchestrator.commands.paths import find_model, need_root
from orchestrator.commands.threads import use_threads

if TYPE_CHECKING:
    from orchestrator.evaluate.bits import Logits
    from orchestrator.evaluate.run import Progress

QUALITY_LEDGER = Path("bench") / "results" / "quality.jsonl"


@dataclass(frozen=True)
class EvalOptions:
    """The options of the command, as given. `only` is a list with commas; empty runs every section."""

    model: str | None = None
    only: str = ""
    quick: bool = False
    thorough: bool = False
    json: Path | None = None
    plots: Path | None = None
    page: Path | None = None
    ledger: bool = False
    seed: int = 0
    threads: int | None = None


def evaluate(options: EvalOptions) -> int:
    """Measure, print tables, write what was asked for; returns the exit status."""
    if options.quick and options.thorough:
        raise UsageError("--quick, --thorough: give one of them")
    size = "quick" if options.quick else "thorough" if options.thorough else "default"
    use_threads(options.threads)
    from orchestrator.evaluate.sizes import SECTIONS

    sections = tuple(part.strip() for part in options.only.split(",") if part.strip()) or SECTIONS
    for section in sections:
        if section not in SECTIONS:
            raise UsageError(f"--only: got {section!r}, allowed are {', '.join(SECTIONS)}, with commas between them")
    if options.plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plots needs matplotlib: pip install matplotlib")
    ledger = need_root("--ledger") / QUALITY_LEDGER if options.ledger else None
    folder = find_model(options.model)

    from rich.console import Console

    from orchestrator.evaluate.card import compare, read_card
    from orchestrator.evaluate.ledger import append_quality, quality_rows
    from orchestrator.evaluate.needle import needle_maker
    from orchestrator.evaluate.report import plain, print_results, write_json
    from orchestrator.evaluate.run import Evaluation
    from orchestrator.evaluate.text import HeldOut, changed_texts, heldout_documents
    from orchestrator.model.load import load_model
    from orchestrator.text.tokenizer import load_tokenizer

    card = read_card(folder)
    tokenizer, documents = load_tokenizer(folder), heldout_documents()
    with _progress() as progress:
        evaluation = Evaluation(
            folder,
            load_model(folder),
            HeldOut(tokenizer, documents),
            size,
            reference=load_reference(folder) if "bits" in sections else None,
            needles=needle_maker(tokenizer, [text for _, text in documents]),
            notes=changed_texts(documents),
            progress=progress,
            seed=options.seed,
        )
        results = evaluation.run(sections)
    print_results(_console(Console), results, [] if card is None else compare(card, results))
    if options.json is not None:
        write_json(options.json, results)
    if options.page is not None:
        from orchestrator.evaluate.page import write_page

        write_page(options.page, plain(results))
    if options.plots is not None:
        from orchestrator.evaluate.plots import write_plots

        write_plots(options.plots, results)
    if ledger is not None:
        append_quality(ledger, quality_rows(results))
    return 0


def load_reference(folder: Path) -> Logits | None:
    """The training implementation of the same checkpoint, where it is installed."""
    if importlib.util.find_spec("orchestrator.train") is None:
        return None
    if importlib.util.find_spec("orchestrator.train.reference") is None:
        return None
    from orchestrator.train.reference import reference_logits

    return reference_logits(folder)


def _console(make: Callable[..., object]):
    """A console that does not break tables where output is no terminal."""
    return make() if sys.stdout.isatty() else make(width=int(os.environ.get("COLUMNS", "140")))


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar a section on a terminal, a line a section elsewhere; both on standard error."""
    if not sys.stderr.isatty():

        def line(name: str, total: int) -> Callable[[int], None]:
            print(f"{name}: {total:,} tokens", file=sys.stderr, flush=True)
            return lambda tokens: None

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:<12}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:

        def section(name: str, total: int) -> Callable[[int], None]:
            for done in bars.tasks:
                bars.update(done.id, completed=done.total)
            task = bars.add_task(name, total=total)
            return lambda tokens: bars.update(task, advance=tokens)

        yield section
