"""Temperatures of the confidence head, fitted to what drafts meet in decoding and stored in config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orchestrator.evaluate.run import Evaluation
from orchestrator.evaluate.text import HeldOut, heldout_documents
from orchestrator.model.checkpoint import write_config
from orchestrator.model.load import load_model
from orchestrator.text.tokenizer import load_tokenizer


def store_temperatures(folder: Path, *, size: str = "default", seed: int = 1) -> tuple[float, ...]:
    """Decode speculatively from held-out prompts at temperature 1, fit one temperature a position, write them down.

    Returns them. `size` is one of `evaluate.sizes.SIZES`. An evaluation with another seed sees other drafts.
    """
    model = load_model(folder)
    config = replace(model.config, dspark_confidence_temperatures=())
    heldout = HeldOut(load_tokenizer(folder), heldout_documents())
    results = Evaluation(folder, model, heldout, size, seed=seed).run(("calibration",))
    if results.calibration is None:
        raise ValueError(f"folder: got {folder}, a model without draft stages; there is nothing to calibrate")
    fitted = tuple(round(value, 4) for value in results.calibration.temperatures)
    write_config(folder, replace(config, dspark_confidence_temperatures=fitted))
    return fitted
