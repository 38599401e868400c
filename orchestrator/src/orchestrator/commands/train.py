"""`fathom train`: data, backbone, drafter and export of a small model, in one go or in pieces."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.commands.errors import UsageError
from orchestrator.commands.paths import SMALL_MODELS, cache_folder

if TYPE_CHECKING:
    from orchestrator.train.loop import Result
    from orchestrator.train.stages import Plan, Record

STAGES = ("data", "backbone", "drafter", "export", "calibrate", "card")
_STEPS = {"v41-mini": (2450, 1000), "v41-nano": (600, 150)}
_RATES = (3e-3, 2e-3)  # peaks, of backbone and drafter
_SMOKE_BYTES = 400_000
_SMOKE_STEPS = 30


@dataclass(frozen=True)
class TrainOptions:
    """The options of the command, as given."""

    name: str = "v41-mini"
    out: Path | None = None
    data: Path | None = None
    device: str | None = None
    steps: int | None = None
    drafter_steps: int | None = None
    minutes: float | None = None
    seed: int = 0
    stages: tuple[str, ...] = STAGES
    export_to: Path | None = None
    lr: float | None = None
    smoke: bool = False


def train(options: TrainOptions) -> int:
    """Run the stages that are not done yet; returns the exit status. Raises UsageError for options that cannot be."""
    began = time.monotonic()
    if options.smoke:
        options = replace(options, name="v41-nano", out=options.out or Path("runs") / "smoke")
    _check(options)
    from orchestrator.train.loop import TrainingFailed
    from orchestrator.train.stages import Record, train_backbone, train_drafter

    plan = _plan(options)
    record = Record(plan)

    def minutes() -> float | None:
        return None if options.minutes is None else options.minutes - (time.monotonic() - began) / 60

    runs: dict[str, Callable[..., Result | None]] = {"backbone": train_backbone, "drafter": train_drafter}
    for stage in (stage for stage in STAGES if stage in options.stages):
        left = minutes()
        if left is not None and left <= 0:
            return _say_how_to_go_on(options, f"Time is used up before the {stage} stage.")
        if stage == "data":
            _build_data(plan, record, options)
        elif stage == "export":
            _export(plan, record, options)
        elif stage == "calibrate":
            _calibrate(plan, record, options)
        elif stage == "card":
            from orchestrator.train.package import describe

            describe(plan, record, options.export_to or plan.out / "model", command=_from_scratch(options))
        else:
            _need_data(plan)
            try:
                result = runs[stage](plan, record, minutes)
            except TrainingFailed as error:
                raise UsageError(str(error), code=1) from error
            if result is not None and not result.done:
                note = f"Stopped at step {result.step} of {plan.steps[stage]} of the {stage} stage; its state is saved."
                return _say_how_to_go_on(options, note, 130 if result.stopped == "signal" else 0)
            _note(f"{stage}: done, {record.of(stage)['steps']} steps, loss {record.of(stage)['loss']:.4f}")
    return 0


def _check(options: TrainOptions) -> None:
    if options.name not in SMALL_MODELS:
        raise UsageError(f"NAME: got {options.name!r}, allowed is {' or '.join(SMALL_MODELS)}")
    wrong = sorted(set(options.stages) - set(STAGES))
    if wrong or not options.stages:
        raise UsageError(f"--stages: got {', '.join(wrong) or 'none'}, allowed is any of {','.join(STAGES)}")
    for name, value in (("--steps", options.steps), ("--drafter-steps", options.drafter_steps)):
        if value is not None and value < 1:
            raise UsageError(f"{name}: got {value}, allowed is 1 or more")
    if options.minutes is not None and not options.minutes > 0:
        raise UsageError(f"--minutes: got {options.minutes}, allowed is a number above 0")
    if options.lr is not None and not options.lr > 0:
        raise UsageError(f"--lr: got {options.lr}, allowed is a number above 0")
    import torch

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if options.device is not None and options.device not in devices:
        raise UsageError(f"--device: got {options.device!r}, allowed here is {' or '.join(devices)}")


def _plan(options: TrainOptions) -> Plan:
    import torch

    from orchestrator.train.stages import Plan

    out = options.out or Path("runs") / options.name
    defaults = (_SMOKE_STEPS, _SMOKE_STEPS) if options.smoke else _STEPS[options.name]
    steps, drafter = options.steps or defaults[0], options.drafter_steps or defaults[1]
    return Plan(
        name=options.name,
        out=out,
        data=options.data or out / "data",
        device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        seed=options.seed,
        lr={"backbone": options.lr or _RATES[0], "drafter": _RATES[1]},
        steps={"backbone": steps, "drafter": drafter},
        every=5 if options.smoke else 20,
        evaluate_every=15 if options.smoke else 500,
        small_batches=options.smoke,
    )


def _build_data(plan: Plan, record: Record, options: TrainOptions) -> None:
    if (plan.data / "meta.json").is_file():
        _note(f"data: {plan.data} is there")
        return
    from orchestrator.corpus.build import build_dataset
    from orchestrator.model.presets import preset

    limit = _SMOKE_BYTES if options.smoke else None
    meta = build_dataset(
        plan.data, preset(plan.name), cache=cache_folder() / "corpus", seed=plan.seed, limit_bytes=limit
    )
    record.put("data", {"tokens": meta["train"]["tokens"]})
    _note(f"data: {meta['train']['tokens']:,} training tokens in {plan.data}")


def _need_data(plan: Plan) -> None:
    path = plan.data / "meta.json"
    if not path.is_file():
        raise UsageError(f"{plan.data} holds no dataset; run the data stage, or give --data FOLDER")
    from orchestrator.model.presets import preset

    got, need = json.loads(path.read_text(encoding="utf-8"))["vocab_size"], preset(plan.name).vocab_size
    if got != need:
        raise UsageError(f"--data: {plan.data} was made for a vocabulary of {got}, {plan.name} has {need}")


def _export(plan: Plan, record: Record, options: TrainOptions) -> None:
    from orchestrator.train.package import package

    folder = options.export_to or plan.out / "model"
    ours = record.of("export").get("folders", [])
    if list(folder.glob("*.safetensors")) and str(folder.resolve()) not in ours:
        raise UsageError(f"{folder} holds weights that this run did not write; give another --export-to")
    record.put("export", {"folders": sorted({*ours, str(folder.resolve())})})
    package(plan, record, folder, command=_from_scratch(options))
    _note(f'export: {folder}\nTry it: fathom generate "def fibonacci(n):" --model {folder}')


def _calibrate(plan: Plan, record: Record, options: TrainOptions) -> None:
    from orchestrator.train.temperatures import store_temperatures

    if not record.of("drafter"):
        raise UsageError("calibrate: there are no draft stages; run the drafter and the export stage first")
    folder = options.export_to or plan.out / "model"
    fitted = store_temperatures(folder, size="quick" if options.smoke else "default", seed=plan.seed + 1)
    record.put("calibrate", {"temperatures": list(fitted)})
    _note(f"calibrate: temperatures {', '.join(f'{value:g}' for value in fitted)} in {folder / 'config.json'}")


def _say_how_to_go_on(options: TrainOptions, note: str, code: int = 0) -> int:
    _note(f"{note}\nTo go on: {_command(options, options.minutes)}")
    return code


def _from_scratch(options: TrainOptions) -> str:
    """The command for the card: the whole chain, wherever it is run."""
    return _command(replace(options, out=None, data=None, export_to=None, device=None, stages=STAGES), None)


def _command(options: TrainOptions, minutes: float | None) -> str:
    """The command line that these options stand for."""
    default: Any = TrainOptions()
    words = ["fathom", "train"] + ([] if options.smoke else [options.name])
    for name in ("out", "data", "device", "steps", "drafter_steps", "seed", "export_to", "lr"):
        value = getattr(options, name)
        if value != getattr(default, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    if options.stages != STAGES:
        words += ["--stages", ",".join(options.stages)]
    if minutes is not None:
        words += ["--minutes", f"{minutes:g}"]
    return " ".join([*words, *(["--smoke"] if options.smoke else [])])


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
