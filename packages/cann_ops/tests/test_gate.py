"""The lowering gate: every kernel at the model's shapes: kind of core, memories, flags, calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from cann_ops import gate, lowering, structure
from cann_ops.kernels import Kernel
from cann_ops.shapes import SHAPES, Shape

ROOT = Path(__file__).parents[3]
HEAVY = ("latent_attention", "mx_linear", "hc_rows", "index_scores")


def _param(shape):
    return pytest.param(shape, marks=[pytest.mark.slow] if shape.kernel.module in HEAVY else [], id=str(shape.kernel))


@pytest.mark.parametrize("shape", [_param(shape) for shape in SHAPES])
def test_a_shape_lowers_and_fits(lowers, shape):
    lowered = lowering.lower(shape.kernel)
    assert structure.problems(lowered, shape.core, shape.calls) == []
    memory = structure.read(lowered).memory
    assert memory["UB"] > 0
    if shape.core != "__vector__":
        assert memory["L1"] > 0 and memory["L0C"] > 0
    assert set(lowered.sizes) <= {p.name for p in lowered.parameters if not p.pointer}


def test_the_text_is_the_same_every_time(lowers):
    kernel = Kernel.of("store_rows", code_bytes=288, scale_bytes=0, rows_per_block=64)
    assert lowering.lower_afresh(kernel) == lowering.lower_afresh(kernel)


def test_what_was_lowered_is_kept(lowers, monkeypatch, tmp_path):
    monkeypatch.setenv("CANN_OPS_CACHE", str(tmp_path))
    kernel = Kernel.of("gather_rows", row=96)
    first = lowering.lower.__wrapped__(kernel)
    monkeypatch.setattr(lowering, "lower_afresh", lambda kernel: pytest.fail("lowered again"))
    monkeypatch.setattr(lowering, "available", lambda: (False, "a machine without TileLang"))
    assert lowering.lower.__wrapped__(kernel) == first


@pytest.mark.parametrize(
    "module, sizes",
    [
        ("kv_rows", {"format": "main", "D": 96, "norm": False, "rope": False, "round_bf16": False}),
        ("norm_quantize", {"D": 1000, "norm": False}),
        ("swiglu_quantize", {"inter": 100}),
        ("store_rows", {"code_bytes": 0, "scale_bytes": 0, "rows_per_block": 4}),
        ("gather_rows", {"row": 0}),
        ("route", {"experts": 8, "top_k": 9, "image": False}),
        ("select_top", {"k": 0}),
        ("index_scores", {"heads": 8, "rows_per_block": 64}),
        ("latent_attention", {"heads": 16, "near_steps": 1, "far_steps": 0}),
        ("mx_linear", {"rows": 8, "N": 128, "K": 256, "e2m1": True}),
        ("hc_rows", {"d": 64, "update": False, "mix": False, "norm": False}),
        ("hc_products", {"width": 100}),
        ("hc_sinkhorn", {"iters": 0}),
    ],
)
def test_sizes_without_a_program_are_refused(lowers, module, sizes):
    with pytest.raises(ValueError, match=r"got .* allowed"):
        Kernel.of(module, **sizes).program()


@pytest.mark.slow
def test_the_document_has_the_memories(lowers):
    page = ROOT / "docs" / "kernels" / "cann_ops.md"
    if not page.is_file():
        pytest.skip("needs the checkout")
    assert gate.table() in page.read_text(encoding="utf-8")


def test_the_gate_fails_where_a_kernel_does(lowers, monkeypatch, capsys):
    """A shape with a wrong kind of core, and one that has no program."""
    store = Kernel.of("store_rows", code_bytes=288, scale_bytes=0, rows_per_block=64)
    shapes = (Shape(store, "__cube__", (), ()), Shape(store, "__vector__", ("asc_mmad",), ()))
    monkeypatch.setattr(gate, "SHAPES", shapes)
    assert gate.main(["store"]) == 1
    said = capsys.readouterr().out
    assert "core: got __vector__" in said and "asc_mmad is missing" in said
    assert gate.main(["nothing of the name"]) == 0


def test_no_lowered_text_lies_in_the_repository():
    assert not [p for p in (ROOT / "packages" / "cann_ops").rglob("*.asc") if "emulator" not in p.parts]
