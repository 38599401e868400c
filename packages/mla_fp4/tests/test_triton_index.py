"""The Triton index scores: interpreted on a CPU against the reference, and compiled for two generations of GPUs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernel_core.testing.child import call_in_child, load_file

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed, so its kernels cannot be run")


def cases() -> ModuleType:
    """The module that builds ragged batches."""
    return load_file(Path(__file__).with_name("conftest.py"))


def interpreted() -> dict[str, float]:
    """Largest error by case, over the size of the scores. Needs TRITON_INTERPRET=1 from before the import."""
    import triton.language as tl

    from mla_fp4 import triton_index
    from mla_fp4.reference.indexer import index_scores

    made, errors = cases(), {}
    for name, lengths, visible, shape in (
        ("nano", [3, 0, 1, 2], [0, 1, 70, 200, 129, 130], {"heads": 4, "dim": 32}),
        ("mini", [2, 1], [63, 64, 65], {"heads": 8, "dim": 128}),
        ("32 heads, short pages", [1, 1], [49, 3], {"heads": 32, "dim": 128, "rows_per_block": 24}),
        ("33 heads", [2], [5, 80], {"heads": 33, "dim": 64}),
        ("nothing visible", [2], [0, 0], {"heads": 4, "dim": 32}),
    ):
        case = made._build(lengths, visible, **shape)
        if name == "mini":  # magnitudes over many decades, zeros, ties of the query's rounding
            case["q"] *= torch.exp(torch.randn(3, 8, 1) * 6)
            case["q"][0, 0] = 0
            ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75])
            case["q"][1, 0, :12] = ties
        expected = index_scores(**case)
        scores = triton_index.index_scores(**case, dot=tl.float32)
        assert scores.shape == expected.shape and scores.isneginf().equal(expected.isneginf()), name
        finite = ~expected.isneginf()
        if not finite.any():
            errors[name] = 0.0
            continue
        # By row, whose sizes differ by decades.
        size = expected.masked_fill(~finite, 0).abs().amax(-1, keepdim=True).clamp(min=1e-30)
        gap = torch.where(finite, (scores - expected).abs(), 0.0) / size
        errors[name] = float(gap.max())
    case = made._build([5], [150, 153, 156, 159, 162], heads=8, dim=128)
    whole = triton_index.index_scores(**case, dot=tl.float32)
    one = triton_index.index_scores(**made._rows(case, slice(3, 4)), dot=tl.float32)
    errors["a row alone"] = 0.0 if one[0].equal(whole[3, : one.shape[1]]) else 1.0
    return errors


def compiled(arch: int) -> int:
    """Bytes of machine code for 32 heads of 128 channels."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mla_fp4 import triton_index as module

    kinds = {"q": "*bf16", "weights": "*fp32", "pages": "*u8", "table": "*i32", "owners": "*i32", "visible": "*i32"}
    kinds |= {"out": "*fp32"} | dict.fromkeys(("heads", "rows_per_block", "reach", "width"), "i32")
    names = module._scores.arg_names
    constants = {"HEADS": 32, "HALF": 64, "KEYS": module.KEYS, "DOT": tl.bfloat16}
    source = ASTSource(
        module._scores,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    return len(triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["cubin"])


@needs_triton
def test_interpreted_against_the_reference():
    errors = call_in_child(__file__, "interpreted()", TRITON_INTERPRET="1")
    assert isinstance(errors, dict) and len(errors) == 6
    assert max(errors.values()) < 1e-5, errors


@needs_triton
@pytest.mark.parametrize("arch", [90, 100])
def test_compiles(arch):
    size = call_in_child(__file__, f"compiled({arch})")
    assert isinstance(size, int) and size > 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton")
@pytest.mark.parametrize("heads", [8, 32])
def test_on_a_gpu_against_the_reference(heads):
    from mla_fp4 import triton_index
    from mla_fp4.reference.indexer import index_scores

    case = cases()._build([3, 0, 2], [0, 1, 700, 1029, 64], heads=heads, dim=128)
    expected = index_scores(**case)
    device = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    first = triton_index.index_scores(**device).cpu()
    assert first.isneginf().equal(expected.isneginf())
    seen = ~expected.isneginf()
    assert (first[seen] - expected[seen]).norm() / expected[seen].norm() < 1e-5  # operands are exact in bfloat16
    for _ in range(20):
        assert triton_index.index_scores(**device).cpu().equal(first)
