"""Naming a device, bringing weights there, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from orchestrator.commands.device import check_device
from orchestrator.commands.errors import UsageError
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.sampler import _fetched
from orchestrator.model import device as devices
from orchestrator.model.rope import RopeTable, inverse_frequencies


def tensors(value, found):
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            tensors(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            tensors(item, found)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            tensors(getattr(value, field.name), found)
    return found


def test_weights_and_tables_move_whole(nano):
    for value in (nano.weights, nano.tables):
        there = devices.moved(value, torch.device("meta"))
        before, after = tensors(value, []), tensors(there, [])
        assert len(before) == len(after) > 5 and all(t.device.type == "meta" for t in after)
        assert [(t.dtype, t.shape) for t in before] == [(t.dtype, t.shape) for t in after]
        assert devices.moved(value, torch.device("cpu")) is value
    assert devices.moved(nano.weights, torch.device("meta")).config is nano.config


def test_names(monkeypatch):
    assert devices.resolve_device("cpu") == torch.device("cpu")
    check_device("cpu")
    with pytest.raises(ValueError, match="'tpu', allowed are 'cpu' and 'cuda'"):
        devices.resolve_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, words in (("13.0", "sees no NVIDIA GPU"), (None, "is a build without CUDA")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(UsageError, match=f"--device: got 'cuda'.*{words}.*fathom doctor"):
            check_device("cuda")


def test_a_gpu_without_our_kernels_says_how_to_build_them(monkeypatch):
    import kernel_core.cuda

    def missing(package):
        raise RuntimeError(f"{package} was built without its CUDA kernels; FATHOM_CUDA=ON")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernel_core.cuda, "cuda_module", missing)
    with pytest.raises(ValueError, match=r"mla_fp4 was built without.*FATHOM_CUDA=ON"):
        devices.resolve_device("cuda")


def test_configuration_and_model_have_to_agree(nano):
    with pytest.raises(ValueError, match="device: got 'tpu'"):
        EngineConfig(device="tpu")
    with pytest.raises(ValueError, match="device: got 'cuda', allowed is 'cpu', where the model is"):
        Engine(nano, None, EngineConfig(device="cuda"))
    assert Engine(nano, None, EngineConfig(num_blocks=2, max_num_seqs=1)).runner.graphs is None


def test_rotary_tables_stay_in_place_once_reserved():
    table = RopeTable(inverse_frequencies(16, 1e4))
    table.reserve(9000)
    address = table._table.data_ptr()
    positions = torch.tensor([0, 5, 9000])
    rows = table.rows(positions, 9000)
    assert table._table.data_ptr() == address and table._table.shape[0] > 9000
    assert rows.equal(RopeTable(inverse_frequencies(16, 1e4)).rows(positions, 9000))


def test_results_come_in_one_copy():
    tokens, logprobs = torch.tensor([0, -1, 129_279]), torch.tensor([-0.1, float("nan"), -123.4567])
    there, values = _fetched(tokens, logprobs)
    assert there.equal(tokens) and values[[0, 2]].equal(logprobs[[0, 2]]) and values[1].isnan()
