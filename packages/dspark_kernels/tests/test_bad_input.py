"""Wrong arguments are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dspark_kernels
import kernel_core


def arguments() -> dict:
    return {
        "logits": torch.zeros(2, 40), "temperature": torch.ones(2), "top_p": torch.ones(2),
        "top_k": torch.zeros(2, dtype=torch.int32), "seeds": torch.zeros(2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros(2, 0)),
        ("logits", torch.zeros(40)),
        ("logits", torch.zeros(2, 40, dtype=torch.bfloat16)),
        ("logits", torch.zeros(40, 2).T),
        ("temperature", torch.ones(3)),
        ("temperature", torch.tensor([1.0, -0.5])),
        ("temperature", torch.tensor([torch.nan, 1.0])),
        ("temperature", torch.tensor([1.0, torch.inf])),
        ("top_p", torch.tensor([1.0, 0.0])),
        ("top_p", torch.tensor([1.0, 1.5])),
        ("top_p", torch.tensor([1.0, torch.nan])),
        ("top_k", torch.tensor([1, -1], dtype=torch.int32)),
        ("top_k", torch.tensor([1, 1])),
        ("seeds", torch.zeros(2, dtype=torch.int32)),
        ("seeds", torch.zeros(1, dtype=torch.int64)),
        ("positions", torch.zeros(3, dtype=torch.int64)),
        ("case", 8),
        ("case", -1),
    ],
)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_sample(name, value, backend):
    with kernel_core.using(backend), pytest.raises(ValueError, match=f"{name}: got .* allowed"):
        dspark_kernels.sample(**{**arguments(), name: value})


def test_the_row_is_named():
    with pytest.raises(ValueError, match=r"temperature: got -0.5 in row 1"):
        dspark_kernels.sample(**{**arguments(), "temperature": torch.tensor([1.0, -0.5])})


def test_other_ops():
    logits = torch.zeros(2, 40)
    for k in (0, 41):
        with pytest.raises(ValueError, match="k: got"):
            dspark_kernels.top_logprobs(logits, k)
    with pytest.raises(ValueError, match="bitmask"):
        dspark_kernels.apply_token_mask(logits, torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="bitmask"):
        dspark_kernels.apply_token_mask(logits, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="bitmask"):
        dspark_kernels.apply_token_mask(logits, torch.zeros(2, 2, dtype=torch.int32), torch.tensor([0]))
    with pytest.raises(ValueError, match="positions"):
        dspark_kernels.uniform(torch.tensor([1]), torch.tensor([1, 2]))


def test_other_devices_are_named():
    meta = {k: v.to("meta") for k, v in arguments().items()}
    with pytest.raises(NotImplementedError, match=r"dspark_kernels.sample.*'meta'.*cpu"):
        dspark_kernels.sample(**meta)


def test_imports_kernel_core_only():
    ours = {"mla_fp4", "swa_replay", "mega_moe", "mhc_engram", "ep_comm", "orchestrator"}
    for path in Path(dspark_kernels.__file__).parent.rglob("*.py"):
        assert not set(path.read_text().replace(".", " ").split()) & ours, path
