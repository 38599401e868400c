"""The training loop: resumes, logs, stops in time, and leaves a state from which the same run goes on.

A run that was stopped and resumed computes the same as one in a piece: batches and random numbers depend on seed and
step only, everything else is in the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from orchestrator.train import log
from orchestrator.train.interrupts import Interrupts
from orchestrator.train.progress import Progress
from orchestrator.train.protocols import Phase, Source, Trainable, Updates
from orchestrator.train.run import Run
from orchestrator.train.schedule import learning_rate, phase_at

BAD_INTERVALS = 20
"""Logged intervals in a row without one finite loss after which a run gives up."""


class TrainingFailed(RuntimeError):
    """The loss stayed without a finite value."""


@dataclass(frozen=True)
class Result:
    """Where a call of `train` ended. Counts and seconds are those of the whole run, earlier calls included."""

    step: int
    stopped: Literal["done", "time", "signal"]
    tokens: int
    seconds: float
    loss: float | None
    skipped: int

    @property
    def done(self) -> bool:
        return self.stopped == "done"


def train(
    model: Trainable,
    optimizer: Updates,
    batches: Source,
    phases: Sequence[Phase],
    steps: int,
    *,
    lr: float,
    state_path: str | Path,
    log_path: str | Path,
    seed: int,
    minutes: float | None = None,
    every: int = 20,
    evaluate: Callable[[int], Mapping[str, float]] | None = None,
    evaluate_every: int = 500,
    title: str = "train",
    gradients: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]] | None = None,
) -> Result:
    """Train to `steps` in all, from the state in `state_path` if there is one; `lr` is the peak rate.

    Ends early, with the state saved, when `minutes` of wall time are nearly used, on Ctrl-C or on SIGTERM (a second
    one ends at once). Every `every` steps a line goes to `log_path`, and at most then the host waits for the device.
    `evaluate` gets the number of steps done. `steps` may differ from that of an earlier call: shares of progress, and
    with them phases and rates, follow the new number. Raises `TrainingFailed` if no loss of `BAD_INTERVALS` lines was
    finite; the state is then the last one that was saved. `gradients(tokens, phase, step)` replaces loss and backward
    pass, as `graphs.CapturedGradients` does.
    """
    if steps < 1 or every < 1:
        raise ValueError(f"steps, every: got {steps}, {every}, allowed is 1 or more")
    phase_at(phases, 0.0)  # refuses wrong ends before anything is computed
    run = Run(model, optimizer, Path(state_path), Path(log_path), steps, minutes, seed)
    run.resume()
    means, bad, last, loss_seen = log.Means(), 0, time.monotonic(), run.loss
    tokens_at_last, phase, rate = run.tokens, phase_at(phases, 0.0), 0.0

    def write_line() -> None:
        nonlocal bad, last, tokens_at_last, loss_seen
        count = means.steps
        values = means.take()
        now = time.monotonic()
        run.step_seconds = (now - last) / count
        speed = (run.tokens - tokens_at_last) / max(now - last, 1e-9)
        line = {"step": run.step, "phase": list(phases).index(phase), "tokens": run.tokens, **values, "lr": rate}
        log.append(run.log_path, {**line, "tokens_per_second": speed, "elapsed": run.elapsed()})
        loss_seen = values["loss"] if values["loss"] is not None else loss_seen
        bad = bad + 1 if values["loss"] is None else 0
        run.loss, last, tokens_at_last = loss_seen, now, run.tokens
        bar.update(run.step, values["loss"], speed, (steps - run.step) * run.step_seconds)
        if bad >= BAD_INTERVALS:
            raise TrainingFailed(
                f"no finite loss in the last {bad} lines of {run.log_path} (step {run.step}); {run.state_path} is of "
                f"step {run.saved}: lower lr and go on from it"
            )

    with Interrupts() as interrupts, Progress(title, steps) as bar:
        if run.step < steps:
            run.save()  # shows that the place can be written, and how long it takes
        last = time.monotonic()
        stopped: Literal["done", "time", "signal"] = "done"
        while run.step < steps:
            evaluates = evaluate is not None and ((run.step + 1) % evaluate_every == 0 or run.step + 1 == steps)
            if interrupts.seen or run.out_of_time((time.monotonic() - last) / max(means.steps, 1), evaluates):
                stopped = "signal" if interrupts.seen else "time"
                break
            progress = run.step / steps
            following = phase_at(phases, progress)
            if means.steps and following is not phase:
                write_line()
            phase, rate = following, lr * learning_rate(progress, steps)
            values = _one_step(model, optimizer, batches, phase, run.step, rate, progress, seed, gradients)
            if not means.fits(values):
                write_line()
            run.step += 1
            run.tokens += phase.batch * phase.length
            means.add(values)
            if run.step % every == 0 or evaluates or run.step == steps:
                write_line()
            if evaluates and evaluate is not None:
                run.evaluate(evaluate)
                last = time.monotonic()
            if not bad and run.save_due():
                run.save()
        if means.steps:
            write_line()
        if not bad and run.step != run.saved:
            run.save()
    return Result(run.step, stopped, run.tokens, run.elapsed(), loss_seen, int(optimizer.skipped))


def _one_step(
    model: Trainable,
    optimizer: Updates,
    batches: Source,
    phase: Phase,
    step: int,
    rate: float,
    progress: float,
    seed: int,
    gradients: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]] | None,
) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed * 1_000_003 + step)
    tokens = batches.get(step, phase.batch, phase.length)
    optimizer.zero_grad()
    if gradients is None:
        loss, metrics = model.loss(tokens, phase, step)
        loss.backward()
    else:
        loss, metrics = gradients(tokens, phase, step)
    norm = optimizer.step(rate)
    model.after_step(progress)
    return {"loss": loss.detach(), **metrics, "gradient_norm": norm}
