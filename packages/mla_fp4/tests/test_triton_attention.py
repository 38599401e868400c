"""The Triton kernel: interpreted on a CPU against the reference, and compiled for two generations of GPUs.

Both need Triton, which a machine without a GPU may lack.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernel_core.testing.child import call_in_child, load_file

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed, so its kernels cannot be run")
CASES = Path(__file__).with_name("test_sparse_attention.py")


def cases() -> ModuleType:
    """The module that builds ragged batches."""
    return load_file(CASES)


def interpreted() -> dict[str, float]:
    """Largest errors by case. Needs TRITON_INTERPRET=1 from before the import."""
    import triton.language as tl

    from mla_fp4 import triton_attention
    from mla_fp4.reference.attention import sparse_attention

    made = cases()
    errors = {}

    def attend(case, **changes):
        return triton_attention.sparse_attention(**{**case, **changes}, dot=tl.float32)

    for name, shape, lengths, starts, lower in (
        ("ragged", made.NANO, [3, 1, 0, 5], [0, 40, 9, 7], [0, 20, 0, 0]),
        ("two chunks of selected rows", {**made.NANO, "selected": 150}, [2, 2], [100, 3], [0, 0]),
        ("no selected rows", {**made.NANO, "selected": 0}, [2], [30], [0]),
        ("production rows, odd heads", {**made.MINI, "heads": 3}, [2, 1], [200, 5], [0, 3]),
        ("more heads than a program takes", {**made.NANO, "heads": 33}, [1], [8], [0]),
    ):
        case = made.build(lengths, starts, lower=lower, **shape)
        out = torch.full_like(case["q"], float("nan"))
        result = attend(case, out=out)
        errors[name] = float((result - sparse_attention(**case)).abs().max())
        assert result is out

    case = made.build([2, 3], [50, 9], **made.NANO)
    whole = attend(case)
    alone = made.build([2, 3], [50, 9], **made.NANO)
    row = {
        "q": alone["q"][4:5], "new_rows": alone["new_rows"][2:5], "rope": alone["rope"][4:5],
        "indices": alone["indices"][4:5], "ring_slot": alone["ring_slot"][1:], "block_table": alone["block_table"][1:],
        "lower": alone["lower"][1:],
    }  # fmt: skip
    # The last row as a step of its own: what came before it now stands in the ring.
    ring = alone["ring"].clone()
    for at, fresh in ((9, 0), (10, 1)):
        ring[row["ring_slot"].long(), at % ring.shape[1]] = row["new_rows"][fresh]
    row |= {"ring": ring, "new_rows": row["new_rows"][2:], "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32)}
    single = attend({**alone, **row, "start_pos": torch.tensor([11])})
    errors["a row alone"] = 0.0 if single[0].equal(whole[4]) else 1.0

    for value, name in ((float("inf"), "sink +inf"), (float("-inf"), "sink -inf")):
        changed = {**case, "sink": torch.full_like(case["sink"], value)}
        errors[name] = float((attend(changed) - sparse_attention(**changed)).abs().max())
    empty = {**case, "indices": torch.full_like(case["indices"], -1), "lower": torch.tensor([10**6, 10**6])}
    errors["no keys at all"] = float(attend(empty).abs().max())
    return errors


def compiled(arch: int) -> list[dict[str, int]]:
    """Registers and stack bytes of the chunk kernel for 16 and 32 heads of production rows."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mla_fp4 import triton_attention as module

    integers = ("heads", "window", "window_chunks", "ring_rows", "rows_per_block", "reach", "selected")
    kinds = dict.fromkeys(("new_rows", "ring", "pages"), "*u8") | dict.fromkeys(
        ("positions", "starts", "lowers"), "*i64"
    )
    kinds |= dict.fromkeys(("slots", "owners", "firsts", "table", "indices"), "*i32") | {"q": "*bf16", "scale": "fp32"}
    kinds |= dict.fromkeys(("top_out", "sum_out", "even_out", "odd_out"), "*fp32") | dict.fromkeys(integers, "i32")
    found = []
    for heads, tile in module._TILES.items():
        constants = {"HEADS": heads, "HALF": 256, "TILE": tile, "KEYS": module.CHUNK, "DOT": tl.bfloat16}
        names = module._chunk.arg_names
        signature = {name: kinds.get(name, "constexpr") for name in names}
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in kinds.items() if kind.startswith("*")}
        source = ASTSource(module._chunk, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": module._WARPS})
        usage = resources(Path(triton.__file__).parent, kernel.asm["cubin"])
        found.append({"heads": heads, "registers": usage["REG"], "stack": usage["STACK"]})
    return found


def resources(triton_folder: Path, cubin: bytes) -> dict[str, int]:
    """What the assembler gave a kernel, by the tool that comes with Triton. A spill shows as a stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton_folder / "backends" / "nvidia" / "bin" / "cuobjdump"
        done = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if "REG:" in line)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", line)}


@needs_triton
def test_interpreted_against_the_reference():
    errors = call_in_child(__file__, "interpreted()", TRITON_INTERPRET="1")
    assert isinstance(errors, dict) and len(errors) >= 8
    assert max(errors.values()) < 5e-6, errors


@needs_triton
@pytest.mark.parametrize("arch", [90, 100])
def test_compiles_without_spills(arch):
    found = call_in_child(__file__, f"compiled({arch})")
    assert isinstance(found, list) and [kernel["heads"] for kernel in found] == [16, 32]
    assert all(kernel["stack"] == 0 and 0 < kernel["registers"] <= 255 for kernel in found), found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton")
@pytest.mark.parametrize("heads", [4, 8, 16, 32, 64])
def test_on_a_gpu_against_the_reference(heads):
    from mla_fp4 import triton_attention
    from mla_fp4.reference.attention import sparse_attention

    case = cases().build([3, 1, 5], [0, 300, 70], lower=[0, 20, 0], **{**cases().MINI, "heads": heads})
    case["q"] = case["q"].bfloat16()
    expected = sparse_attention(**{**case, "q": case["q"].float()})
    device = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    out = torch.full_like(device["q"], float("nan"))
    first = triton_attention.sparse_attention(**device, out=out).float().cpu()
    assert (first - expected).norm() / expected.norm() < 6e-3
    for _ in range(20):
        assert triton_attention.sparse_attention(**device).float().cpu().equal(first)
