"""The command line of the runner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import kernel_core
from bench import format, gate, ledger, report, tables
from bench.discover import ROOT, Entry, Found, discover, select
from bench.status import CURRENT, STALE, gpus_of, states, states_of_ops
from kernel_core.bench import Case, append_row, ceilings, check_case, cuda_ceilings, device_ledger, run_case

COMMANDS = ("run", "list", "status", "tables", "plot", "rank", "spec", "profile", "cache", "ep", "service")
_EXAMPLES = """\b
Examples:
  fathom bench list                          what can be run
  fathom bench mla_fp4                       every op of a package
  fathom bench index_topk 'mla_decode_*'     an op, and points by pattern
  fathom bench mla_fp4 --device cuda --points '*_h64_*'
  fathom bench --all --device cuda --check   run and check everything once, time nothing
  fathom bench mega_moe --budget 5 --threads 1 --dry-run
  fathom bench status                        rows older than the sources
  fathom bench tables --write                refresh docs and READMEs
  fathom bench rank --device cuda --page docs/rank.md
  fathom bench spec                          what speculation gains, by concurrency
  fathom bench profile --steps 8             trace of decode steps for Perfetto
  fathom bench cache --traces FOLDER         the KV cache: hits on traces, index, erasure code
  fathom bench ep --gpus 2                   expert parallelism between the GPUs of this host
  fathom bench service --quick               several processes under clients and kills
"""

app = typer.Typer(help="Time kernels beside their reference and against measured ceilings.", add_completion=False,
                  rich_markup_mode=None, epilog=_EXAMPLES)  # fmt: skip
console = Console()


def run(argv: Sequence[str]) -> int:
    """Entry for other programs: the exit status. A first word that is neither a command nor --help means `run`."""
    args = list(argv)
    if not args:
        args = ["--help"]
    elif args[0] not in (*COMMANDS, "--help"):
        args.insert(0, "run")
    try:
        return app(args, prog_name="fathom bench", standalone_mode=False) or 0
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        return 130
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        console.print(f"fathom bench: {error.format_message()}", style="red", markup=False, highlight=False)
        return getattr(error, "exit_code", 2)


@app.command("run")
def run_command(
    names: Annotated[list[str] | None, typer.Argument(help="packages, ops or points; patterns allowed")] = None,
    everything: Annotated[bool, typer.Option("--all", help="run every case")] = False,
    points: Annotated[list[str] | None, typer.Option(help="of these, only points of this pattern; may repeat")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda for the benches of an NVIDIA GPU")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="ledger file that rows are added to; default: bench/results/DEVICE.jsonl")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="do not write the ledger")] = False,
    check: Annotated[bool, typer.Option("--check", help="run and check every case once, time nothing")] = False,
    budget: Annotated[float, typer.Option(help="seconds of timing a case", min=0)] = 2.0,
    threads: Annotated[int | None, typer.Option(help="threads of kernels and reference", min=1)] = None,
    gated: Annotated[
        bool, typer.Option("--gate", help="exit with 1 when a point is slower than in the ledger")
    ] = False,
    isa: Annotated[str | None, typer.Option(help="use at most scalar, avx2, avx512 or amx")] = None,
) -> None:
    """Time cases, print a table, add rows to the ledger."""
    found = _discover().on(_checked(device))
    if out is None:
        name = "cpu" if device == "cpu" else device_ledger(torch.cuda.get_device_name())
        out = ledger.RESULTS / f"{name}.jsonl"
    past = ledger.load(out.parent).get(out.stem, [])
    if not names and not everything:
        raise typer.BadParameter("name a package, an op or a point, or ask for --all; `list` shows what there is")
    try:
        chosen = select(found, names or [], points or [])
        limit = kernel_core.limit_isa(isa) if isa else contextlib.nullcontext()
        with limit:
            backend = f"{device}-{isa}" if isa else device
            if check:
                _check(chosen, device)
                return
            rows, failed = _run(chosen, budget, threads, backend, None if dry_run else out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    report.results(console, rows)
    if rows:
        report.ceilings(console, rows[0])
        written = f"{len(rows)} rows added to {out}; `fathom bench tables --write` brings the documents up to date"
        console.print("not written" if dry_run else written, highlight=False)
    slower = gate.regressions(rows, past) if gated else []
    for sentence in slower:
        console.print(sentence, style="red", markup=False, highlight=False)
    if failed or slower or found.errors:
        raise typer.Exit(1)


@app.command("list")
def list_command() -> None:
    """Show every op and its points."""
    found = _discover()
    table = Table("op", "point", "shape")
    for entry, case in found.cases():
        table.add_row(entry.bench.op, case.point, format.shape(case.shape))
    console.print(table)
    if found.errors:
        raise typer.Exit(1)


@app.command("status")
def status_command(
    check: Annotated[bool, typer.Option("--check", help="exit with 1 when a row is stale")] = False,
    results: Annotated[Path, typer.Option(help="folder of the ledger")] = ledger.RESULTS,
) -> None:
    """Name every row whose sources have changed since, and every case without a row."""
    found = _discover()
    stale = 0
    for device, rows in {"cpu": [], **ledger.load(results)}.items():
        table = Table("op", "point", "state", "measured", title=f"{device}.jsonl", title_justify="left")
        kind = "cpu" if device == "cpu" else "cuda"
        if gpus_of(device) > 1:
            from bench.ep.rows import OPS, digest

            all_states = states_of_ops({op: digest(op) for op in OPS}, rows)
        else:
            all_states = states(found.on(kind), rows, missing=device == "cpu")
        for state in all_states:
            if state.state != CURRENT:
                table.add_row(state.op, state.point, state.state, state.date)
        current = sum(state.state == CURRENT for state in all_states)
        stale += sum(state.state == STALE for state in all_states)
        if table.row_count:
            console.print(table)
        console.print(f"{device}: {current} of {len(all_states)} points are current", highlight=False)
    if check and stale:
        raise typer.Exit(1)


@app.command("tables")
def tables_command(
    write: Annotated[bool, typer.Option("--write", help="rewrite the documents")] = False,
) -> None:
    """Compare the tables of docs and READMEs with the ledger; rewrite them with --write."""
    ledgers = ledger.load()
    different = []
    for path in tables.documents():
        text = path.read_text(encoding="utf-8")
        made = tables.regenerate(text, ledgers)
        if made != text:
            different.append(path.relative_to(ROOT).as_posix())
            if write:
                path.write_text(made, encoding="utf-8")
    verb = "rewritten" if write else "differ from the ledger"
    console.print(f"{verb}: {', '.join(different)}" if different else "all tables match the ledger", highlight=False)
    if different and not write:
        raise typer.Exit(1)


@app.command("plot")
def plot_command(
    out: Annotated[Path, typer.Argument(help="picture to write: .png, .svg or .pdf")],
    device: Annotated[str, typer.Option(help="ledger to draw")] = "cpu",
) -> None:
    """Draw how near each point is to its bound. Needs matplotlib."""
    from bench import plot

    try:
        plot.draw(ledger.load().get(device, []), device, out)
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    console.print(f"written: {out}", highlight=False)


def _discover() -> Found:
    found = discover()
    for name, reason in found.errors.items():
        console.print(f"{name} could not be loaded: {reason}", style="red", markup=False, highlight=False)
    return found


def _checked(device: str) -> str:
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device: got {device!r}, allowed are cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: this PyTorch sees no NVIDIA GPU; leave it out to time the CPU")
    return device


def _run(
    chosen: Sequence[tuple[Entry, Case]], budget: float, threads: int | None, backend: str, out: Path | None
) -> tuple[list[ledger.Row], int]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    rows: list[ledger.Row] = []
    failed = 0
    try:
        _warn_when_busy()
        with console.status("measuring the ceilings of this machine"):
            rates = cuda_ceilings() if backend == "cuda" else ceilings()
        for number, (entry, case) in enumerate(chosen, 1):
            with console.status(f"{number}/{len(chosen)} {entry.bench.op} {case.point}"):
                try:
                    row = run_case(entry.bench, case, package=entry.package, ceilings=rates, budget_s=budget,
                                   backend=backend)  # fmt: skip
                except Exception as error:  # the others still run
                    failed += 1
                    _say_failed(case, error)
                    if _device_is_lost(entry):
                        failed += len(chosen) - number
                        break
                    continue
            rows.append(row)
            if not console.is_terminal:  # a log should show how far it got
                report.line(console, row)
            if out is not None:
                append_row(out, row)
    finally:
        torch.set_num_threads(before)
    return rows, failed


def _check(chosen: Sequence[tuple[Entry, Case]], device: str) -> None:
    """Run and check each case once; exits with 1 where one fails."""
    failed = 0
    for number, (entry, case) in enumerate(chosen, 1):
        with console.status(f"{number}/{len(chosen)} {entry.bench.op} {case.point}"):
            try:
                left_out = check_case(entry.bench, case)
            except Exception as error:  # the others still run
                failed += 1
                _say_failed(case, error)
                if _device_is_lost(entry):
                    break
                continue
        console.print("; ".join([f"{case.point} ok", *left_out]), markup=False, highlight=False)
    if failed:
        raise typer.Exit(1)
    console.print(f"{len(chosen)} cases checked on the {device} device", highlight=False)


def _say_failed(case: Case, error: Exception) -> None:
    console.print(f"{case.point} failed: {type(error).__name__}: {error}", style="red", markup=False, highlight=False)


def _device_is_lost(entry: Entry) -> bool:
    """An illegal access ends everything that the process can do on a GPU."""
    if entry.bench.device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except Exception as error:  # the type differs between versions of PyTorch
        reason = str(error).splitlines()[0]
        console.print(f"the device is lost to this process, the rest was not run: {reason}", style="red", markup=False)
        return True
    return False


def _warn_when_busy() -> None:
    """Other programs make every figure of the run worthless; the ledger keeps the load beside the row."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.5 * cores:
        console.print(f"other programs are running here (load {load:.1f} on {cores} cores): times will be too long",
                      style="yellow", highlight=False)  # fmt: skip


@app.command("rank")
def rank_command(
    device: Annotated[str, typer.Option(help="cuda; cpu with --small")] = "cuda",
    sequences: Annotated[str, typer.Option(help="sequences of the decode steps")] = "8,32,64,128,256",
    prefill: Annotated[str, typer.Option(help="tokens of the prefill steps")] = "4096,16384",
    context: Annotated[int, typer.Option(help="tokens before a decode step, at least 3", min=3)] = 8192,
    out: Annotated[
        Path | None, typer.Option(help="JSON file of the figures; default: bench/results/rank/DEVICE.json")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="write tables here and a picture beside them")] = None,
    small: Annotated[
        bool, typer.Option("--small", help="try the command on a small model; writes no default file")
    ] = False,
    shown: Annotated[Path | None, typer.Option("--from", help="measure nothing, take the figures of this file")] = None,
) -> None:
    """Time one rank of the full model: steps, and each op against its bound.

    Random weights in the stored formats, 13 GB of them. Examples: `fathom bench rank`, `fathom bench rank --small
    --device cpu --sequences 2 --prefill 64 --context 200`.
    """
    from bench.rank import command, show

    try:
        if shown is not None:
            steps, about = show.load(shown)
            command.write_page(steps, about, page or ROOT / "docs" / "rank.md")
            return
        if _checked(device) == "cpu" and not small:
            raise ValueError("device: got 'cpu', allowed is 'cuda', or 'cpu' with --small")
        command.run(console, device, _numbers(sequences), _numbers(prefill), context, out, small, page)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command("spec")
def spec_command(
    model: Annotated[str | None, typer.Option(help="folder of a checkpoint, or v41-mini or v41-nano")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, where steps are timed")] = "cpu",
    sequences: Annotated[str, typer.Option(help="requests at once in the timed runs; empty times none")] = "1,4,16",
    tokens: Annotated[int, typer.Option(help="output tokens of a request", min=8)] = 48,
    temperature: Annotated[float, typer.Option(help="of the requests", min=0)] = 1.0,
    curve: Annotated[
        Path | None, typer.Option(help="also weigh drafts by this cost curve: figures of `fathom bench rank`")
    ] = None,
    rank: Annotated[
        bool, typer.Option("--rank", help="run v41-flash-rank with the model's recorded acceptance instead")
    ] = False,
    small: Annotated[bool, typer.Option("--small", help="try --rank with v41-nano")] = False,
    trials: Annotated[
        Path | None, typer.Option(help="recorded acceptance: read if the file is there, else written")
    ] = None,
    steps: Annotated[int, typer.Option(help="timed steps of a run, on a GPU and with --rank", min=2)] = 16,
    out: Annotated[Path | None, typer.Option(help="JSON file of the figures")] = None,
    page: Annotated[Path | None, typer.Option(help="write tables here and a picture beside them")] = None,
    shown: Annotated[Path | None, typer.Option("--from", help="measure nothing, take the figures of this file")] = None,
) -> None:
    """Throughput, verified and accepted length by concurrency: without drafts, with five, with as many as pay.

    With --curve the same from the model's acceptance and another machine's step times; with --rank from steps of
    production shapes, whose curve is measured first.
    """
    from bench.spec import command

    try:
        counts = _numbers(sequences)
        if rank and not counts:
            raise ValueError("sequences: got none, allowed is at least one with --rank")
        if rank and _checked(device) == "cpu" and not small:
            raise ValueError("device: got 'cpu', allowed is 'cuda', or 'cpu' with --small")
        wanted = command.Wanted(
            model, _checked(device), counts, tokens, temperature, curve, trials, rank, small, steps
        )  # fmt: skip
        command.run(console, wanted, out, page, shown)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command("profile")
def profile_command(
    model: Annotated[str | None, typer.Option(help="folder of a checkpoint, or v41-mini or v41-nano")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    sequences: Annotated[int, typer.Option(help="requests at once", min=1)] = 8,
    context: Annotated[int, typer.Option(help="tokens of a request", min=1)] = 256,
    steps: Annotated[int, typer.Option(help="traced decode steps", min=2)] = 6,
    speculation: Annotated[str, typer.Option(help="off, scheduled or a number of drafts")] = "scheduled",
    out: Annotated[Path, typer.Option(help="trace file to write")] = Path("trace.json"),
) -> None:
    """Trace some decode steps: host and device, steps, ops and kernels, for ui.perfetto.dev."""
    from bench.profile import command
    from orchestrator.commands.errors import UsageError
    from orchestrator.commands.speculation import speculation_of

    try:
        command.run(console, model, _checked(device), sequences, context, steps, speculation_of(speculation), out)
    except (ValueError, UsageError) as error:
        raise typer.BadParameter(str(error)) from error


@app.command("cache")
def cache_command(
    traces: Annotated[
        Path | None, typer.Option(help="folder of recorded traces; without it the replay is left out")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file; default: bench/results/cache/cpu.json")] = None,
    page: Annotated[Path | None, typer.Option(help="write tables here and a picture beside them")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="try the command; writes no default file")] = False,
    shown: Annotated[Path | None, typer.Option("--from", help="measure nothing, take the figures of this file")] = None,
    engine: Annotated[bool, typer.Option("--engine", help="only the time to the first token, hot and cold")] = False,
    model: Annotated[Path, typer.Option(help="checkpoint for --engine")] = ROOT / "models" / "v41-mini",
    tokens: Annotated[int, typer.Option(min=512, help="prompt length for --engine")] = 16384,
) -> None:
    """Measure the KV cache: hits on traces, index, match of a prompt, erasure code, read tail; with --engine the
    time to the first token."""
    from bench.cache import command, show

    try:
        if engine:
            command.first_tokens(console, model, tokens)
            return
        if shown is not None:
            command.write_page(show.load(shown), page or ROOT / "docs" / "kv_cache_measured.md")
            return
        command.run(console, traces, out, page, quick)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command("ep")
def ep_command(
    gpus: Annotated[int, typer.Option(help="processes, a GPU each", min=2)] = 2,
    parts: Annotated[
        str, typer.Option(help="of faults, traffic, moves, experts, engine")
    ] = "faults,traffic,moves,experts,engine",
    quick: Annotated[bool, typer.Option("--quick", help="a few small sizes; writes no default file")] = False,
    out: Annotated[Path | None, typer.Option(help="ledger file; default: bench/results/DEVICExGPUS.jsonl")] = None,
) -> None:
    """Check and measure expert parallelism between GPUs: dispatch, combine, moves, fused experts, the engine."""
    from bench.ep import command

    try:
        status = command.run(console, gpus, [p for p in parts.split(",") if p], quick, out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if status:
        raise typer.Exit(status)


@app.command("service")
def service_command(
    parts: Annotated[
        str, typer.Option(help="of latency, prefixes, recovery, storm")
    ] = "latency,prefixes,recovery,storm",
    clusters: Annotated[str, typer.Option(help="launchers: local, ray, or both")] = "local",
    prefill: Annotated[int, typer.Option(help="prefill workers", min=1)] = 2,
    decode: Annotated[int, typer.Option(help="decode workers", min=1)] = 2,
    encoder: Annotated[int, typer.Option(help="encoders", min=0)] = 1,
    requests: Annotated[int, typer.Option(help="streaming requests of the storm", min=1)] = 500,
    at_once: Annotated[int, typer.Option(help="of them at once", min=1)] = 24,
    mean: Annotated[float, typer.Option(help="seconds between two faults of the storm, in the mean", min=0.1)] = 6.0,
    kinds: Annotated[str, typer.Option(help="faults of the storm: of kill, pause, drain")] = "kill",
    leaving: Annotated[float, typer.Option(help="share of clients that go away", min=0.0, max=1.0)] = 0.1,
    kills: Annotated[int, typer.Option(help="kills a role whose recovery is timed", min=1)] = 3,
    counts: Annotated[str, typer.Option(help="clients at once whose latency is measured")] = "1,4,16",
    seed: Annotated[int, typer.Option(help="of requests and faults")] = 1,
    model: Annotated[str, typer.Option(help="folder of a checkpoint, or v41-mini or v41-nano")] = "v41-mini",
    device: Annotated[str, typer.Option(help="cpu, or cuda: two engine processes on one GPU")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="try the command; writes no default file")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file; default: bench/results/service/DEVICE.json")] = None,
    page: Annotated[Path | None, typer.Option(help="write tables here and pictures beside them")] = None,
    shown: Annotated[Path | None, typer.Option("--from", help="measure nothing, take the figures of this file")] = None,
) -> None:
    """Measure `fathom serve --cluster`: latency, prefixes, recovery after a kill, and many clients while processes die.

    Exits with 1 when a client got anything but what one undisturbed process gives. Examples: `fathom bench service
    --quick`, `fathom bench service --clusters local,ray --page docs/service_measured.md`, `fathom bench service --parts
    storm --requests 2000 --kinds kill,pause,drain`, `fathom bench service --device cuda`.
    """
    from bench.service import command, figures
    from bench.service.run import Wanted

    split = lambda text: tuple(part.strip() for part in text.split(",") if part.strip())  # noqa: E731
    try:
        if shown is not None:
            command.write_page(console, figures.load(shown), page or ROOT / "docs" / "service_measured.md")
            return
        wanted = Wanted(
            parts=split(parts), clusters=split(clusters), prefill=prefill, decode=decode, encoder=encoder,
            requests=requests, at_once=at_once, mean=mean, kinds=split(kinds), leaving=leaving, kills=kills,
            counts=tuple(_numbers(counts)), model=model, device=_checked(device), seed=seed, quick=quick,
        )  # fmt: skip
        status = command.measure(console, wanted, out, page)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if status:
        raise typer.Exit(status)


def _numbers(text: str) -> list[int]:
    """ "8,32" as [8, 32]; nothing as []."""
    parts = [part for part in text.split(",") if part.strip()]
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"got {text!r}, allowed are numbers above 0, separated by commas")
    return [int(part) for part in parts]
