"""Experts of a layer that are kept packed alone, as they are on a device with kernels for that."""

from __future__ import annotations

import copy
import dataclasses

import torch

import mega_moe
from mega_moe.ops.packed import pack_where_it_fits
from orchestrator.model.moe import Moe
from orchestrator.model.presets import v41_nano
from orchestrator.model.random_weights import random_weights


def made(config, layer, monkeypatch, *, packed):
    with monkeypatch.context() as patch:
        if packed:
            patch.setattr(mega_moe, "pack_for", lambda _, *weights: pack_where_it_fits(*weights))
        return Moe(config, 0, layer, "fixed", config.num_experts_per_tok)


def test_the_stored_form_goes_and_results_stay(monkeypatch):
    config = dataclasses.replace(v41_nano(stages=0), hidden_size=256, moe_intermediate_size=256)
    layer = random_weights(config, device=torch.device("cpu")).layers[0]
    whole = made(config, copy.copy(layer), monkeypatch, packed=False)
    alone = made(config, layer, monkeypatch, packed=True)
    assert whole.packed is None and alone.packed is not None
    kept = [getattr(layer.experts, field.name) for field in dataclasses.fields(layer.experts)]
    assert sum(t.untyped_storage().nbytes() for t in kept) == 0
    x = torch.randn(5, 256)
    assert torch.equal(alone(x, None, None, None), whole(x, None, None, None))


def test_narrow_models_keep_what_they_have(monkeypatch):
    config = v41_nano(stages=0)
    layer = random_weights(config, device=torch.device("cpu")).layers[0]
    assert made(config, layer, monkeypatch, packed=True).packed is None and layer.experts.w13.numel()
