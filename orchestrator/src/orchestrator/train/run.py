"""A training run between its steps: counts, clock, state file and log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from orchestrator.train import log
from orchestrator.train.protocols import Trainable, Updates
from orchestrator.train.snapshot import load_state, save_state

_SAVE_SECONDS = 300.0
_FORMAT = 1


class Run:
    """What changes during a run, its files and its clock."""

    def __init__(
        self,
        model: Trainable,
        optimizer: Updates,
        state_path: Path,
        log_path: Path,
        steps: int,
        minutes: float | None,
        seed: int,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.state_path, self.log_path, self.steps, self.seed = state_path, log_path, steps, seed
        self.begin = time.monotonic()
        self.deadline = None if minutes is None else self.begin + 60 * minutes
        self.step = self.tokens = 0
        self.saved = -1
        self.loss: float | None = None
        self.step_seconds = self.save_seconds = self.evaluate_seconds = self.before = 0.0
        self.saved_at = self.begin

    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.begin

    def resume(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self.state_path.is_file():
            self._load()
        log.cut_after(self.log_path, self.step)

    def _load(self) -> None:
        tensors, meta = load_state(self.state_path)
        if meta.get("format") != _FORMAT:
            raise ValueError(f"{self.state_path}: got format {meta.get('format')}, allowed is {_FORMAT}")
        if meta["seed"] != self.seed:
            raise ValueError(
                f"seed: got {self.seed}, allowed is {meta['seed']}, with which {self.state_path} was begun"
            )
        values = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
        mine = self.model.tensors()
        if set(values) != set(mine):
            name = sorted(set(values) ^ set(mine))[0]
            raise ValueError(f"{self.state_path}: is the state of another model ({name}); give another folder")
        for name, value in values.items():
            if value.shape != mine[name].shape:
                raise ValueError(f"{self.state_path}: {name} is {list(value.shape)}, not {list(mine[name].shape)}")
        with torch.no_grad():
            for name, value in values.items():
                mine[name].copy_(value)
        rest = {name.removeprefix("optimizer/"): t for name, t in tensors.items() if name.startswith("optimizer/")}
        self.optimizer.load_state_dict(rest)
        self.step = self.saved = meta["step"]
        self.tokens, self.before, self.loss = meta["tokens"], meta["seconds"], meta["loss"]

    def save(self) -> None:
        begin = time.monotonic()
        tensors = {f"model/{name}": value for name, value in self.model.tensors().items()}
        tensors |= {f"optimizer/{name}": value for name, value in self.optimizer.state_dict().items()}
        meta: dict[str, Any] = {"format": _FORMAT, "seed": self.seed, "step": self.step, "steps": self.steps}
        meta |= {"tokens": self.tokens, "seconds": self.elapsed(), "loss": self.loss}
        save_state(self.state_path, tensors, meta)
        self.saved, self.saved_at = self.step, time.monotonic()
        self.save_seconds = max(self.save_seconds, self.saved_at - begin)

    def save_due(self) -> bool:
        return time.monotonic() - self.saved_at > max(_SAVE_SECONDS, 20 * self.save_seconds)

    def evaluate(self, function: Callable[[int], Mapping[str, float]]) -> None:
        """Log what `function` says of this step."""
        begin = time.monotonic()
        values = {"step": self.step, "tokens": self.tokens, "evaluation": dict(function(self.step))}
        log.append(self.log_path, values)
        self.evaluate_seconds = time.monotonic() - begin

    def out_of_time(self, step_seconds: float, evaluates: bool) -> bool:
        """Whether two more steps and a save that takes twice as long as the longest so far might be too much.

        `step_seconds` is what a step takes since the last line; on a device that computes behind the host it is too
        little, so the last line's figure counts too. `evaluates`: an evaluation follows the next step.
        """
        if self.deadline is None:
            return False
        margin = 2 * max(step_seconds, self.step_seconds) + 2 * self.save_seconds + 1
        return time.monotonic() + margin + evaluates * self.evaluate_seconds > self.deadline
