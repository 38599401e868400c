"""The Triton kernel: interpreted on a CPU against the reference, and compiled for two generations of GPUs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernel_core.testing.child import call_in_child, load_file

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed, so its kernels cannot be run")


def module(name: str) -> ModuleType:
    """A file beside this one."""
    return load_file(Path(__file__).with_name(f"{name}.py"))


def interpreted() -> dict[str, float]:
    """Largest error by case. Needs TRITON_INTERPRET=1 from before the import."""
    import triton.language as tl

    from swa_replay import reference, triton_attention

    build, tests = module("conftest")._build, module("test_window_attention")
    errors = {}

    def attend(case, **changes):
        return triton_attention.window_attention(**{**case, **changes}, dot=tl.float32)

    for name, lengths, starts, shape in (
        ("one row", [1], [0], tests.NANO),
        ("ragged", [0, 3, 0, 5, 1], [7, 30, 0, 0, 131], tests.NANO),
        ("a window of one", [4], [5], {**tests.NANO, "heads": 1, "window": 1}),
        ("production rows", [3], [133], {**tests.MINI, "heads": 6}),
        ("33 heads, no rotation", [2], [40], {**tests.NANO, "rope_dim": 0, "heads": 33}),
    ):
        case = build(lengths, starts, **shape)
        for block in (False, True):
            out = torch.full_like(case["q"], float("nan"))
            attend(case, block=block, out=out)
            errors[f"{name}, block={block}"] = float(
                (out - reference.window_attention(**case, block=block)).abs().max()
            )

    case = build([3, 2], [50, 9], **tests.NANO)
    rows = [1, 2, 4]
    errors["rows alone"] = 0.0 if attend(tests.select(case, rows)).equal(attend(case)[rows]) else 1.0
    broken = {**case, "new_rows": case["new_rows"].clone()}
    broken["new_rows"][2] = 255  # NaN for whoever reads it
    errors["a NaN in a later row"] = 0.0 if attend(broken)[:2].equal(attend(case)[:2]) else 1.0
    nothing = {**case, "lower": torch.tensor([10**6, 10**6])}
    errors["no keys"] = float(attend(nothing).abs().max())
    return errors


def compiled(arch: int) -> list[int]:
    """Bytes of machine code for 16 and 32 heads of production rows."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from swa_replay import triton_attention as kernels

    kinds = {"q": "*bf16", "out": "*bf16", "new_rows": "*u8", "ring": "*u8", "sink": "*fp32", "rope": "*fp32"}
    kinds |= dict.fromkeys(("slots", "row_owners", "cu"), "*i32") | dict.fromkeys(
        ("positions", "starts", "lowers"), "*i64"
    )
    kinds |= dict.fromkeys(("heads", "window", "ring_rows", "turned"), "i32") | {"scale": "fp32"}
    names, sizes = kernels._attend.arg_names, []
    for heads, keys in kernels._STEPS.items():
        constants = {"HEADS": heads, "HALF": 256, "KEYS": keys, "BLOCK": False, "DOT": tl.bfloat16}
        source = ASTSource(
            kernels._attend,
            {name: kinds.get(name, "constexpr") for name in names},
            {(names.index(name),): value for name, value in constants.items()},
        )
        options = {"num_warps": kernels._WARPS}
        sizes.append(len(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["cubin"]))
    return sizes


@needs_triton
def test_interpreted_against_the_reference():
    errors = call_in_child(__file__, "interpreted()", TRITON_INTERPRET="1")
    assert isinstance(errors, dict) and len(errors) == 13
    assert max(errors.values()) < 5e-6, errors


@needs_triton
@pytest.mark.parametrize("arch", [90, 100])
def test_compiles(arch):
    sizes = call_in_child(__file__, f"compiled({arch})")
    assert isinstance(sizes, list) and len(sizes) == 2 and min(sizes) > 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton")
@pytest.mark.parametrize("heads", [4, 16, 64])
@pytest.mark.parametrize("block", [False, True])
def test_on_a_gpu_against_the_reference(heads, block):
    from swa_replay import reference, triton_attention

    case = module("conftest")._build([5, 0, 3], [200, 3, 9], **{**module("test_window_attention").MINI, "heads": heads})
    case["q"] = case["q"].bfloat16()
    expected = reference.window_attention(**{**case, "q": case["q"].float()}, block=block)
    device = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    first = triton_attention.window_attention(**device, block=block).float().cpu()
    assert (first - expected).norm() / expected.norm() < 6e-3
    for _ in range(20):
        assert triton_attention.window_attention(**device, block=block).float().cpu().equal(first)
