"""From ops to the compiled module: every call fits its binding, with CPU tensors in the place of a GPU's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernel_core import formats
from kernel_core.testing.bindings import FakeModule
from swa_replay import cuda

SPARSE = Path(__file__).parents[2] / "mla_fp4" / "csrc" / "cuda"


def test_store_window(monkeypatch):
    fake = FakeModule(Path(__file__).parents[1] / "csrc" / "cuda", {})
    monkeypatch.setattr(cuda, "cuda_module", lambda _: fake)
    monkeypatch.setattr(cuda, "stream", lambda _: 5)
    new, ring = torch.zeros(3, 66), torch.zeros(4, 7, 66)
    cu, two = torch.tensor([0, 1, 3], dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    cuda.store_window(new, ring, two.int(), cu, two, two)
    cuda.store_window(new[:0], ring, two.int(), cu, two, two)
    ((name, call),) = fake.calls
    assert name == "store_window" and call["row_bytes"] == 264 and call["stream"] == 5
    assert (call["rows"], call["batch"], call["slots"], call["ring_rows"]) == (3, 2, 4, 7)


@pytest.mark.parametrize("there", ["no package", "does not fit", "fits"])
def test_window_attention_is_sparse_attention_without_rows(monkeypatch, there):
    seen = []

    def attend(*arguments, out):
        seen.append(arguments)
        return arguments[0]

    kernels = SimpleNamespace(fits=lambda *_: there == "fits", sparse_attention=attend)
    monkeypatch.setattr(cuda, "sparse_kernels", lambda: None if there == "no package" else kernels)
    q, x = torch.zeros(3, 4, 512), torch.zeros(1)
    result = cuda.window_attention(q, x, x, x, x, x, x, 128, x, x, 0.5, out=None)
    assert (result is q) == (there == "fits")
    if there == "fits":
        assert seen[0][8:12] == (None, 1, None, None) and len(seen[0]) == 15


def prefill_case():
    return {
        "q": torch.zeros(3, 64, 512, dtype=torch.bfloat16),
        "new_rows": formats.quantize_window(torch.randn(3, 512)),
        "ring": torch.zeros(4, 134, 528, dtype=torch.uint8),
        "ring_slot": torch.ones(2, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 1, 3], dtype=torch.int32),
        "start_pos": torch.zeros(2, dtype=torch.int64),
        "lower": torch.zeros(2, dtype=torch.int64),
        "window": 128,
        "sink": torch.zeros(64),
        "rope": torch.zeros(3, 64),
        "scale": 0.5,
    }


@pytest.fixture
def sparse(monkeypatch):
    if not SPARSE.is_dir():
        pytest.skip("needs mla_fp4 beside this package")
    fake = FakeModule(SPARSE, {"window_run_rows": 2})
    monkeypatch.setattr(cuda, "cuda_module", lambda name: fake if name == "mla_fp4" else None)
    monkeypatch.setattr(cuda, "stream", lambda _: 5)
    monkeypatch.setattr(cuda, "multiprocessors", lambda _: 132)
    return fake


def test_window_prefill(sparse):
    case = prefill_case()
    out = cuda.window_prefill(**case)
    (_, sizes), (name, call) = sparse.calls
    assert name == "window_prefill" and (call["run_rows"], call["stream"], call["out"]) == (2, 5, out.data_ptr())
    assert sizes == {"rows": 3, "heads": 64, "batch": 2, "multiprocessors": 132}
    assert (call["slots"], call["ring_rows"], call["window"], call["scale"]) == (4, 134, 128, 0.5)
    assert all(call[n] == v.data_ptr() for n, v in case.items() if torch.is_tensor(v))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.zeros(3, 64, 512)),
        ("q", torch.zeros(3, 40, 512, dtype=torch.bfloat16)),
        ("window", 129),
        ("ring", torch.zeros(4, 100, 528, dtype=torch.uint8)),
        ("ring", torch.zeros(4, 134, 512)),
        ("rope", torch.zeros(3, 32)),
        ("rope", torch.zeros(3 * 64 + 1)[1:].view(3, 64)),
    ],
)
def test_what_window_prefill_does_not_take(sparse, name, value):
    with pytest.raises(ValueError, match=name):
        cuda.window_prefill(**prefill_case() | {name: value})
    assert sparse.calls == []
