"""`fathom simulate`: the service under a virtual clock, with faults from a seed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.simulate.run import Result
    from orchestrator.simulate.sweep import Summary

_HUNT_SEEDS = 200
_HUNT_MINUTES = 3.0


@dataclass(frozen=True)
class SimulateOptions:
    """The options of the command, as given. `faults` is a list with commas; empty draws from all kinds."""

    seed: int | None = None
    seeds: int = 20
    minutes: float | None = None
    jobs: int = 1
    faults: str = ""
    trace: bool = False
    only: str = ""
    shrink: bool = False
    broken: str | None = None
    broken_variants: bool = False
    matrix: bool = False
    json: Path | None = None
    list_faults: bool = False


def simulate(options: SimulateOptions) -> int:
    """Run, print, and return the exit status: 1 where an invariant did not hold."""
    if options.minutes is not None and not options.minutes > 0:
        raise UsageError(f"--minutes: got {options.minutes}, allowed are virtual minutes above 0")
    asked = [options.list_faults, options.matrix, options.broken_variants]
    if sum(asked) > 1:
        raise UsageError("--list-faults, --matrix, --broken-variants: give one of them")
    if options.list_faults:
        return _list_faults()
    if options.matrix:
        return _matrix(options)
    if options.broken_variants:
        return _broken_variants(options)
    return _one(options) if options.seed is not None else _sweep(options)


def _list_faults() -> int:
    from orchestrator.simulate.faults import MENU

    for name, kind in MENU.items():
        print(f"{name:<20} {(kind.__doc__ or '').splitlines()[0]}")
    return 0


def _kinds(options: SimulateOptions) -> tuple[str, ...] | None:
    from orchestrator.simulate.faults import MENU

    names = tuple(part.strip() for part in options.faults.split(",") if part.strip())
    if options.faults == "none":
        return ()
    for name in names:
        if name not in MENU:
            raise UsageError(f"--faults: got {name!r}, allowed are none, or with commas between them {', '.join(MENU)}")
    return names or None


def _one(options: SimulateOptions) -> int:
    """One seed, with its trace or shrunk if that is asked for."""
    from orchestrator.simulate.broken import rules_without
    from orchestrator.simulate.run import simulate as run
    from orchestrator.simulate.scenario import draw
    from orchestrator.simulate.shrink import shrink

    assert options.seed is not None
    rules = None if options.broken is None else rules_without(options.broken)
    scenario = draw(options.seed, options.minutes or 10.0, rules=rules, kinds=_kinds(options))
    only = frozenset(part.strip() for part in options.only.split(",") if part.strip())
    write = (lambda line: print(line)) if options.trace and not options.shrink else None
    result = run(scenario, write, only)
    if options.shrink and not result.ok:
        result = shrink(result, progress=lambda text: print(text, file=sys.stderr))
        if options.trace:
            run(result.scenario, print, only)
        print(f"needed: {result.scenario.seconds:.1f} s, faults:")
        for number, fault in result.faults:
            print(f"  #{number} at {fault.at:.3f} s: {fault}")
    print(result.line)
    print(_figures(result.requests, result.tokens, result.outcomes))
    print(f"{result.seconds:.0f} virtual s, {result.events:,} events, {result.cpu:.2f} s of CPU")
    return 0 if result.ok else 1


def _sweep(options: SimulateOptions) -> int:
    """Many seeds; each one that fails is printed with the command that replays it."""
    from orchestrator.simulate.broken import rules_without
    from orchestrator.simulate.sweep import Job, sweep

    if options.seeds < 1 or options.jobs < 1:
        raise UsageError(f"--seeds, --jobs: got {options.seeds}, {options.jobs}, allowed are 1 or more")
    if options.trace or options.shrink or options.only:
        raise UsageError("--trace, --only, --shrink: give --seed too")
    rules = None if options.broken is None else rules_without(options.broken)
    minutes, kinds = options.minutes or 10.0, _kinds(options)
    jobs = [
        Job(seed, minutes, kinds=kinds) if rules is None else Job(seed, minutes, rules, kinds)
        for seed in range(1, options.seeds + 1)
    ]
    begun = time.monotonic()
    with _progress("seeds", len(jobs)) as seen:
        summary = sweep(jobs, options.jobs, seen)
    _print_summary(summary, time.monotonic() - begun)
    broken = f" --break {options.broken}" if options.broken else ""
    for result in summary.failed:
        print(result.line)
        print(f"  fathom simulate --seed {result.scenario.seed} --minutes {minutes:g}{broken} --shrink --trace")
    if options.json is not None:
        _write_json(options.json, _as_dict(summary))
    return 1 if summary.failed else 0


def _broken_variants(options: SimulateOptions) -> int:
    """How many seeds it took to catch each variant; 1 where one was not caught."""
    from orchestrator.simulate.broken import VARIANTS, hunt

    minutes, missed, rows = options.minutes or _HUNT_MINUTES, 0, []
    seeds = range(1, (options.seeds if options.seeds > 20 else _HUNT_SEEDS) + 1)
    for rule in VARIANTS:
        catch = hunt(rule, seeds, minutes, options.jobs)
        missed += catch.result is None
        found = f"{catch.seeds:>4} seeds  {catch.result.line}" if catch.result else f"not caught by {catch.seeds} seeds"
        print(f"{rule:<18} {found}", flush=True)
        rows.append(
            {
                "rule": rule,
                "seeds": catch.seeds,
                "caught": catch.result is not None,
                "invariant": catch.result.invariant if catch.result else 0,
                "seed": catch.result.scenario.seed if catch.result else 0,
                "minutes": minutes,
            }
        )
    if options.json is not None:
        _write_json(options.json, {"variants": rows})
    return 1 if missed else 0


def _matrix(options: SimulateOptions) -> int:
    from orchestrator.simulate.matrix import PHASES, as_dict, cells, run_cells

    kinds = _kinds(options)
    seeds = range(1, (options.seeds if options.seeds != 20 else 3) + 1)
    wanted = cells(kinds, seeds)
    with _progress("cells", len(wanted)) as seen:
        found = run_cells(wanted, options.jobs, seen)
    table = as_dict(found)
    _print_matrix(table, PHASES)
    if options.json is not None:
        _write_json(options.json, table)
    return 1 if table["lost"] or table["repeated"] or table["failed"] else 0


def _print_matrix(table: dict, phases: tuple[str, ...]) -> None:
    """Seconds to recover at the median, or what went wrong."""
    print(f"{'seconds to recover':<20}" + "".join(f"{phase:>14}" for phase in phases))
    rows: dict[str, dict[str, str]] = {}
    for cell in table["cells"]:
        text = "-" if not cell["runs"] else f"{cell['recover_s']['median']:.2f}"
        if cell["lost"] or cell["repeated"] or cell["failed"]:
            text = f"lost {cell['lost']}" if cell["lost"] else "WRONG"
        rows.setdefault(cell["fault"], {})[cell["phase"]] = text
    for fault, row in rows.items():
        print(f"{fault:<20}" + "".join(f"{row.get(phase, ''):>14}" for phase in phases))
    print(f"requests lost {table['lost']}, tokens repeated {table['repeated']}, in {table['runs']} runs")


def _print_summary(summary: Summary, wall: float) -> None:
    hours = summary.seconds / 3600
    print(f"{summary.runs} seeds, {hours:.1f} virtual hours in {wall:.0f} s ({summary.cpu:.0f} s of CPU), ", end="")
    print(f"{summary.events / max(summary.cpu, 1e-9):,.0f} events a second of CPU")
    print(_figures(summary.requests, summary.tokens, summary.outcomes))
    faults = summary.faults
    print(f"{sum(faults.values()):,} faults: " + ", ".join(f"{name} {count}" for name, count in faults.items()))
    for reason, count in sorted(summary.counts.items()):
        if reason.startswith("failed: "):
            print(f"  {reason} ({count})")
    print(f"{len(summary.failed)} failed" if summary.failed else "every invariant held in every run")


def _figures(requests: int, tokens: int, outcomes: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {count:,}" for name, count in sorted(outcomes.items()))
    return f"{requests:,} requests ({parts}), {tokens:,} tokens"


def _as_dict(summary: Summary) -> dict:
    return {
        "runs": summary.runs,
        "virtual_s": summary.seconds,
        "cpu_s": summary.cpu,
        "events": summary.events,
        "core_steps": summary.steps,
        "requests": summary.requests,
        "tokens": summary.tokens,
        "outcomes": dict(summary.outcomes),
        "faults": summary.faults,
        "failed": [
            {"seed": r.scenario.seed, "invariant": r.invariant, "at_s": r.at, "what": r.what} for r in summary.failed
        ],
    }


def _write_json(path: Path, content: dict) -> None:
    import json

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[Result], None]]:
    """A bar on a terminal, a line now and then elsewhere; both on standard error."""
    done = failed = 0
    if not sys.stderr.isatty():

        def line(result: Result) -> None:
            nonlocal done, failed
            done, failed = done + 1, failed + (not result.ok)
            if done == total or done % max(1, total // 10) == 0:
                print(f"{done} of {total} {what}, {failed} failed", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)

        def step(result: Result) -> None:
            nonlocal failed
            failed += not result.ok
            bars.update(task, advance=1, description=what if not failed else f"{what}, {failed} failed")

        yield step
