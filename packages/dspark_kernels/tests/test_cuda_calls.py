"""From the ops to the compiled CUDA module: every call fits its binding, with CPU tensors in the place of a GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark_kernels import (
    apply_token_mask,
    confidence_head,
    draft_step,
    drafting,
    new_proposals,
    new_schedule,
    new_verified,
    ops,
    sample,
    schedule,
    scheduling,
    verification,
    verify,
)
from dspark_kernels.cuda import confidence as cuda_confidence
from dspark_kernels.cuda import rows as cuda_rows
from dspark_kernels.cuda import schedule as cuda_schedule
from kernel_core.testing.bindings import FakeModule

CSRC = Path(__file__).parents[1] / "csrc" / "cuda"


@pytest.fixture
def fake(monkeypatch):
    module = FakeModule(CSRC, {"rows_workspace": 640})
    for user in (cuda_rows, cuda_schedule, cuda_confidence):
        monkeypatch.setattr(user, "cuda_module", lambda _: module)
        monkeypatch.setattr(user, "stream", lambda _: 77)
    for user in (ops, drafting, verification, scheduling):
        monkeypatch.setattr(user, "elsewhere", lambda *_, kernels=False, **__: "cuda" if kernels else "library")
    return module


def parameters(R):
    return torch.ones(R), torch.ones(R), None, torch.zeros(R, dtype=torch.int64)


def test_schedule(fake):
    confidence, tokens = torch.rand(5, 3), torch.zeros(5, 4, dtype=torch.int64)
    starts, limits = torch.zeros(5, dtype=torch.int64), torch.full((5,), 3, dtype=torch.int32)
    room = new_schedule(5, 3, 12)
    assert schedule(confidence, tokens, starts, limits, 10**12, 12, out=room).lengths is room.lengths
    name, call = fake.calls[-1]
    assert name == "schedule" and (call["requests"], call["drafts"], call["capacity"]) == (5, 3, 12)
    assert call["budget"] == 2**31 and call["device_budget"] == 0 == call["slots"] == call["fixed"]
    names = {"tokens": "input_tokens"}
    for field, tensor in zip(room._fields, room, strict=True):
        assert call[names.get(field, field)] == tensor.data_ptr(), field
    budget = torch.tensor([4], dtype=torch.int32)
    schedule(confidence, tokens, starts, limits, budget, 20, slots=limits, fixed=limits)
    call = fake.calls[-1][1]
    assert call["device_budget"] == budget.data_ptr() and call["slots"] == call["fixed"] == limits.data_ptr()
    count, many = len(fake.calls), torch.zeros(1025, 2)
    limits = torch.ones(1025, dtype=torch.int32)
    schedule(many, torch.zeros(1025, 3, dtype=torch.int64), torch.zeros(1025, dtype=torch.int64), limits, 9, 2000)
    assert len(fake.calls) == count, "more requests than the kernel holds go to PyTorch's operators"


def test_confidence_head(fake):
    hidden, markov, weight = torch.zeros(4, 7, 24)[:, :5], torch.zeros(4, 5, 8), torch.zeros(32)
    results = confidence_head(hidden, markov, weight)
    name, call = fake.calls[-1]
    assert name == "confidence_head" and (call["hidden_request"], call["hidden_draft"]) == (168, 24)
    assert [call[n] for n in ("requests", "drafts", "hidden_size", "markov_size", "temperatures")] == [4, 5, 24, 8, 0]
    assert [call[n] for n in ("logits", "confidence", "survival")] == [t.data_ptr() for t in results]


def test_sample(fake):
    logits, (temperature, top_p, _, seeds) = torch.zeros(3, 40), parameters(3)
    tokens, logprobs = sample(logits, temperature, top_p, None, seeds, seeds, case=3)
    name, call = fake.calls[-1]
    assert name == "sample" and (call["tokens"], call["vocab"], call["draw"], call["top_k"]) == (3, 40, 3, 0)
    assert call["chosen"] == tokens.data_ptr() and call["logprobs"] == logprobs.data_ptr() and call["stream"] == 77
    count = len(fake.calls)
    sample(logits[:0], temperature[:0], top_p[:0], None, seeds[:0], seeds[:0])
    assert len(fake.calls) == count


def test_draft_step(fake):
    logits, out, bias = torch.zeros(4, 3, 40), new_proposals(4, 2), torch.zeros(4, 40)
    coupled = torch.zeros(4, dtype=torch.bool)
    tokens = draft_step(logits, 1, bias, *parameters(4), torch.zeros(4, dtype=torch.int64), out, coupled=coupled)
    name, call = fake.calls[-1]
    assert name == "draft_step" and (call["requests"], call["vocab"], call["drafts"], call["step"]) == (4, 40, 2, 1)
    assert call["logits"] == logits[:, 1].data_ptr() and call["row_stride"] == 120
    assert call["chosen"] == tokens.data_ptr() and call["coupled"] == coupled.data_ptr()
    for field, tensor in zip(out._fields, out, strict=True):
        assert call[field] == tensor.data_ptr(), field


def test_verify(fake):
    logits, drafts, record = torch.zeros(6, 40), torch.zeros(2, 3, 40), new_proposals(2, 2)
    cu, positions = torch.tensor([0, 3, 6], dtype=torch.int32), torch.zeros(6, dtype=torch.int64)
    room = new_verified(2, 2)
    assert verify(logits, drafts, record, cu, positions, *parameters(2), out=room) is room
    name, call = fake.calls[-1]
    assert name == "verify" and [call[n] for n in ("requests", "rows", "vocab", "drafts")] == [2, 6, 40, 2]
    assert (call["draft_request"], call["draft_step"]) == (120, 40)
    for field, tensor in zip(record._fields, record, strict=True):
        assert call[f"draft_{field}"] == tensor.data_ptr(), field
    for field, tensor in zip(room._fields, room, strict=True):
        assert call[field] == tensor.data_ptr(), field
    verify(logits, None, None, torch.arange(7, dtype=torch.int32), positions, *parameters(6))
    call = fake.calls[-1][1]
    assert call["drafts"] == 0 == call["draft_logits"] == call["draft_cut"]
    temperature, _, _, seeds = parameters(6)
    verify(logits, None, None, torch.arange(7, dtype=torch.int32), positions, temperature, None, None, seeds)
    call = fake.calls[-1][1]
    assert call["top_p"] == 0 == call["top_k"] and call["temperature"] == temperature.data_ptr()


def test_masks(fake):
    logits, masks, rows = torch.zeros(6, 40), torch.zeros(2, 2, dtype=torch.int32), torch.tensor([-1, 5])
    apply_token_mask(logits, masks, rows)
    name, call = fake.calls[-1]
    assert name == "token_mask" and (call["count"], call["vocab"], call["words"]) == (2, 40, 2)
    assert call["rows"] == rows.data_ptr() and call["bitmask"] == masks.data_ptr()


def test_a_tensor_elsewhere_is_named(fake):
    temperature, top_p, _, seeds = parameters(3)
    with pytest.raises(ValueError, match="seeds: got a tensor on meta"):
        sample(torch.zeros(3, 40), temperature, top_p, None, seeds.to("meta"), seeds)
