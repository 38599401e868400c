"""From a finished run to a model folder: checkpoint, tokenizer, curves, log and card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from orchestrator.evaluate.card import read_card
from orchestrator.model.checkpoint import Checkpoint, parameter_count, verify_checkpoint
from orchestrator.model.config import ModelConfig
from orchestrator.text.sampling import write_sampling_defaults
from orchestrator.train.card import write_card
from orchestrator.train.curves import plot_curves
from orchestrator.train.export import export_checkpoint, without_drafter
from orchestrator.train.stages import Plan, Record, load_trained

_TEMPERATURE, _TOP_P = 0.5, 0.95  # a small model puts too much on tokens that make no sense


def package(plan: Plan, record: Record, folder: Path, *, command: str) -> ModelConfig:
    """Write the model folder, over one that is there, and read it back once; returns the configuration written.

    Without a trained drafter the model has no draft stages. Raises `ValueError` where the backbone is not done.
    """
    if not record.of("backbone"):
        raise ValueError(f"export: {plan.out} has no finished backbone; run that stage first")
    config, tensors = _model(plan, record)
    config = export_checkpoint(tensors, config, folder, overwrite=True)
    verify_checkpoint(folder)
    write_sampling_defaults(folder, temperature=_TEMPERATURE, top_p=_TOP_P)
    describe(plan, record, folder, command=command)
    return config


def describe(plan: Plan, record: Record, folder: Path, *, command: str) -> None:
    """Write the model folder's card, with the figures of its `card.json` (`fathom eval --json`) if it has one."""
    config = Checkpoint(folder).config
    meta = json.loads((plan.data / "meta.json").read_text(encoding="utf-8"))
    logs = {stage: plan.out / f"{stage}.jsonl" for stage in ("backbone", "drafter") if record.of(stage)}
    facts = _facts(plan, record, config, meta, command) | {"logs": logs, "pictures": _pictures(folder, logs, meta)}
    write_card(folder, facts | {"results": read_card(folder)})


def _model(plan: Plan, record: Record) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config, tensors = plan.config(), load_trained(plan, "backbone")
    if not record.of("drafter"):
        return without_drafter(config), tensors
    return config, tensors | load_trained(plan, "drafter")


def _facts(plan: Plan, record: Record, config: ModelConfig, meta: Mapping[str, Any], command: str) -> dict[str, Any]:
    stages = [{"name": stage, **record.of(stage)} for stage in ("backbone", "drafter") if record.of(stage)]
    untaught = []
    if config.vision is not None:
        count = parameter_count(config) - parameter_count(config, vision=False)
        untaught.append(f"The image encoder's {count:,} parameters are random: images are read and mean nothing.")
    return {
        "name": plan.name,
        "summary": (
            f"A language model of {parameter_count(config, vision=False):,} parameters with the DeepSeek-V4.1 "
            "architecture, trained to show and to check Fathom's inference code."
        ),
        "header": {"license": "apache-2.0", "language": ["en", "code"]},
        "sizes": {
            "parameters": parameter_count(config, vision=False),
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "vocabulary": config.vocab_size,
            "draft stages": config.num_nextn_predict_layers,
        },
        "data": meta,
        "training": {"command": command, "hardware": record.of("backbone")["hardware"], "stages": stages},
        "limits": [f"Longest training sequence: {max(p.length for p in plan.phases['backbone']):,} tokens.", *untaught],
    }


def _pictures(folder: Path, logs: Mapping[str, Path], meta: Mapping[str, Any]) -> dict[str, str]:
    """Curves of each stage; none where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return {}
    ratio = meta["train"]["bytes"] / meta["train"]["tokens"]
    pictures = {}
    for stage, log in logs.items():
        file = f"curves-{stage}.svg"
        if stage == "backbone":
            plot_curves(log, folder / file, title=stage, bytes_per_token=ratio)
        else:
            plot_curves(log, folder / file, title=stage, measure="length", label="tokens a step\n(expected)")
        pictures[f"Training curves of the {stage} stage"] = file
    return pictures
