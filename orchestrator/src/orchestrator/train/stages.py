"""The stages of training a small model: data, backbone, drafter, export. Each can be repeated and goes on where it was.

A run folder holds `run.json` (what is done, and the facts of it), `data/`, and for both trained stages NAME.state (all
of it, to go on), NAME.jsonl (the log) and NAME/ (a compact snapshot, enough to export from).
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orchestrator.model.config import ModelConfig
from orchestrator.model.presets import preset
from orchestrator.train.batches import Batches
from orchestrator.train.loop import Result, train
from orchestrator.train.optimizer import Optimizer
from orchestrator.train.phases import BACKBONE, DRAFTER, Phase
from orchestrator.train.protocols import Trainable
from orchestrator.train.schedule import phase_at
from orchestrator.train.snapshot import load_compact, load_state, save_compact

STAGES = ("data", "backbone", "drafter", "export")
_HELDOUT_TOKENS = 131_072
"""Held-out tokens of an evaluation during training, rounded up to whole batches."""
_AFTER_MINUTES = 0.1  # for what follows the loop: the compact snapshot


@dataclass(frozen=True)
class Plan:
    """What a run is: it may be continued with other steps, but not with another name or seed."""

    name: str
    out: Path
    data: Path
    device: str
    seed: int
    lr: Mapping[str, float]
    steps: Mapping[str, int]
    every: int = 20
    evaluate_every: int = 500
    small_batches: bool = False
    """Batches of a few short sequences: for trying the whole chain, not for training."""

    @property
    def phases(self) -> dict[str, tuple[Phase, ...]]:
        """Phases by stage."""
        phases = {"backbone": BACKBONE[self.name], "drafter": DRAFTER[self.name]}
        if not self.small_batches:
            return phases
        length = 2 * preset(self.name).sliding_window
        return {stage: tuple(replace(p, length=length, batch=2) for p in each) for stage, each in phases.items()}

    def config(self) -> ModelConfig:
        """The architecture, with the size of the token map that the dataset was made with."""
        token_map = np.load(self.data / "engram.npz")["token_map"]
        return replace(preset(self.name), engram_compressed_vocab_size=int(token_map.max()) + 1)


class Record:
    """`run.json`: facts a stage left when it was done."""

    def __init__(self, plan: Plan) -> None:
        self.path = plan.out / "run.json"
        self.facts: dict[str, Any] = {"name": plan.name, "seed": plan.seed, "stages": {}}
        if self.path.is_file():
            self.facts = json.loads(self.path.read_text(encoding="utf-8"))
        for key, value in (("name", plan.name), ("seed", plan.seed)):
            if self.facts[key] != value:
                raise ValueError(
                    f"{key}: got {value!r}, allowed is {self.facts[key]!r}, with which {plan.out} was begun"
                )

    def of(self, stage: str) -> dict[str, Any]:
        """Facts of a stage that is done, else an empty dict."""
        return self.facts["stages"].get(stage, {})

    def put(self, stage: str, facts: Mapping[str, Any]) -> None:
        self.facts["stages"][stage] = dict(facts)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(".run.json.partial")
        partial.write_text(json.dumps(self.facts, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def train_backbone(plan: Plan, record: Record, minutes: Callable[[], float | None]) -> Result | None:
    """Train the text model; None if that was done before."""
    if _is_done(plan, record, "backbone"):
        return None
    return _train(plan, record, "backbone", _backbone(plan), minutes)


def train_drafter(plan: Plan, record: Record, minutes: Callable[[], float | None]) -> Result | None:
    """Train the draft stages on the finished backbone; None if that was done before.

    Raises `ValueError` where the backbone is not done.
    """
    if _is_done(plan, record, "drafter"):
        return None
    if not record.of("backbone"):
        raise ValueError(f"drafter: {plan.out} has no finished backbone; run that stage first")
    from orchestrator.train.drafter import TrainDrafter

    backbone = _backbone(plan)
    _fill(backbone, load_trained(plan, "backbone"))
    return _train(plan, record, "drafter", TrainDrafter(backbone, plan.seed).to(plan.device), minutes)


def load_trained(plan: Plan, stage: str) -> dict[str, torch.Tensor]:
    """Weights of a stage, float32: from its state where it is there, else from its compact snapshot."""
    state = plan.out / f"{stage}.state"
    if state.is_file():
        tensors, _ = load_state(state)
        return {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    if not (plan.out / stage).is_dir():
        raise ValueError(f"stage: {plan.out} has no trained {stage}; run that stage first")
    return {name: value.to(torch.float32) for name, value in load_compact(plan.out / stage)[0].items()}


def hardware(device: str) -> str:
    """The machine in words."""
    if torch.device(device).type == "cuda":
        return f"1 x {torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}"
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}"


def _train(plan: Plan, record: Record, stage: str, model: Any, minutes: Callable[[], float | None]) -> Result:
    """`model` is a Trainable that is a module."""
    phases, steps, left = plan.phases[stage], plan.steps[stage], minutes()
    batches = Batches(plan.data, plan.seed, plan.device)
    gradients = None
    if torch.device(plan.device).type == "cuda":
        from orchestrator.train.graphs import CapturedGradients

        torch.set_float32_matmul_precision("high")  # TF32 for the stream coefficients
        gradients = CapturedGradients(model)
    result = train(
        model,
        Optimizer(model, lr=plan.lr[stage]),
        batches,
        phases,
        steps,
        lr=plan.lr[stage],
        state_path=plan.out / f"{stage}.state",
        log_path=plan.out / f"{stage}.jsonl",
        seed=plan.seed,
        minutes=None if left is None else left - _AFTER_MINUTES,
        every=plan.every,
        evaluate=_Evaluation(model, plan, phases, steps, gradients),
        evaluate_every=plan.evaluate_every,
        title=stage,
        gradients=gradients,
    )
    save_compact(plan.out / stage, model.tensors(), result.step)
    if result.done:
        facts: dict[str, Any] = {
            "steps": result.step,
            "tokens": result.tokens,
            "seconds": result.seconds,
            "loss": result.loss,
        }
        facts |= {"skipped": result.skipped, "hardware": hardware(plan.device), "finished": time.strftime("%Y-%m-%d")}
        record.put(stage, {**facts, "lr": plan.lr[stage], "phases": [dataclasses.asdict(phase) for phase in phases]})
    return result


def _is_done(plan: Plan, record: Record, stage: str) -> bool:
    """Done with at least as many steps as are wanted now."""
    return record.of(stage).get("steps", -1) >= plan.steps[stage]


def _backbone(plan: Plan) -> Any:
    from orchestrator.train.model import TrainModel

    return TrainModel(plan.config(), plan.data / "engram.npz", plan.seed).to(plan.device)


def _fill(model: Trainable, values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in model.tensors().items():
            tensor.copy_(values[name])


class _Evaluation:
    """Means of the metrics over held-out sequences.

    On a CPU as inference would compute them without a bounded decoder tail. On a GPU with the step that is captured at
    the time, in the phase of the time, since another one would have to be compiled and captured first.
    """

    def __init__(self, model: Any, plan: Plan, phases: Sequence[Phase], steps: int, gradients: Any) -> None:
        self._model, self._phases, self._steps, self._gradients = model, phases, steps, gradients
        self._source = Batches(plan.data, plan.seed, "cpu")
        self._device = torch.device(plan.device)
        self._small = plan.small_batches

    def __call__(self, step: int) -> dict[str, float]:
        phase = phase_at(self._phases, (step - 1) / self._steps)
        if self._gradients is None:
            phase = replace(phase, sparse=True, quantised=True, replay=False)
        batches = max(1, _HELDOUT_TOKENS // (phase.batch * phase.length)) if not self._small else 2
        kept = {name: value.clone() for name, value in self._model.named_buffers()}  # counts of tokens an expert
        sums: dict[str, torch.Tensor] = {}
        for batch in self._source.heldout(phase.length, batches * phase.batch, phase.batch):
            for name, value in self._metrics(batch.to(self._device), phase).items():
                sums[name] = sums.get(name, torch.zeros((), device=self._device)) + value.detach()
        for name, value in self._model.named_buffers():
            value.copy_(kept[name])
        return {name: float(value) / batches for name, value in sums.items()}

    def _metrics(self, tokens: torch.Tensor, phase: Phase) -> dict[str, torch.Tensor]:
        if self._gradients is not None:
            return self._gradients(tokens, phase, 0)[1]
        with torch.no_grad():
            return self._model.loss(tokens, phase, 0)[1]
