"""Every kernel at the shapes that the model needs: what the lowering gate lowers, and what each has to look like."""

from __future__ import annotations

from dataclasses import dataclass

from cann_ops.kernels import Kernel

VECTOR, MIX = "__vector__", "__mix__(1, 2)"


@dataclass(frozen=True)
class Shape:
    """A kernel, its kind of core, calls it has to make, and the public ops that launch it."""

    kernel: Kernel
    core: str
    calls: tuple[str, ...]
    ops: tuple[str, ...]


def _vector(kernel: Kernel, *ops: str, calls: tuple[str, ...] = ()) -> Shape:
    return Shape(kernel, VECTOR, ("asc_copy_gm2ub_align", "asc_copy_ub2gm_align", *calls), ops)


def _rows(format: str, d: int, norm: bool) -> Shape:
    kernel = Kernel.of("kv_rows", format=format, D=d, norm=norm, rope=norm, round_bf16=norm)
    code = "simd_inst::vsts_pack_b32" if format == "window" else "simd_inst::vsts_pack_quarter"
    return _vector(kernel, "kv_rows", calls=(code,))


def _store(op: str, codes: int, scales: int, rows: int) -> Shape:
    return _vector(Kernel.of("store_rows", code_bytes=codes, scale_bytes=scales, rows_per_block=rows), op)


def _attention(near: int, far: int, heads: int = 64) -> Shape:
    calls = ("asc_mmad", "asc_copy_l0c2ub", "asc_copy_ub2l1", "simd_inst::vexpdif")
    kernel = Kernel.of("latent_attention", heads=heads, near_steps=near, far_steps=far)
    return Shape(kernel, MIX, calls, ("sparse_attention",) if far else ("window_attention",))


def _product(rows: int, columns: int, depth: int, packed: bool) -> Shape:
    kernel = Kernel.of("mx_linear", rows=rows, N=columns, K=depth, e2m1=packed)
    moved = ("asc_copy_ub2l1", "ascend_nd2nz_scatter") if packed else ()
    calls = ("ascend_blockscaled_gemm_l1", "asc_copy_gm2l1_dn2nz", *moved)
    return Shape(kernel, MIX, calls, ("mx_linear", "fused_experts"))


_D, _INTER = 5120, 2304  # hidden channels, channels of an expert
_SCORES = ("ascend_blockscaled_gemm_l1", "asc_copy_l0c2ub")

SHAPES: tuple[Shape, ...] = (
    *(
        _rows(format, d, norm)
        for format, d in (("main", 512), ("window", 512), ("index", 128))
        for norm in (True, False)
    ),
    _vector(Kernel.of("norm_quantize", D=_D, norm=True), "norm_quantize"),
    _vector(Kernel.of("norm_quantize", D=_D, norm=False), "norm_quantize", "fused_experts"),
    _vector(Kernel.of("swiglu_quantize", inter=_INTER), "swiglu_quantize", "fused_experts"),
    _store("store_main", 288, 0, 64),
    _store("store_main", 288, 0, 128),
    _store("store_index", 64, 4, 64),
    _store("store_index", 64, 4, 128),
    _store("store_window", 528, 0, 134),
    _vector(Kernel.of("gather_rows", row=528), "gather_window"),
    _vector(Kernel.of("route", experts=384, top_k=6, image=False), "route"),
    _vector(Kernel.of("route", experts=384, top_k=6, image=True), "route"),
    _vector(Kernel.of("select_top", k=512), "select_top", "index_topk", calls=("simd_inst::vscatter",)),
    *(
        Shape(Kernel.of("index_scores", heads=32, rows_per_block=rows), MIX, _SCORES, ("index_scores", "index_topk"))
        for rows in (64, 128)
    ),
    _attention(2, 8),
    _attention(2, 0),
    _attention(2, 8, 32),
    *(_product(rows, 2 * _INTER, _D, True) for rows in (16, 128)),
    *(_product(rows, _D, _INTER, True) for rows in (16, 128)),
    _product(16, 2 * _INTER, _D, False),
    _product(16, _D, _INTER, False),
    _vector(Kernel.of("hc_rows", d=_D, update=True, mix=True, norm=True), "hc_step"),
    _vector(Kernel.of("hc_rows", d=_D, update=False, mix=True, norm=True), "hc_mix", "hc_step"),
    _vector(Kernel.of("hc_rows", d=_D, update=True, mix=False, norm=False), "hc_update"),
    Shape(Kernel.of("hc_products", width=4 * _D), MIX, ("ascend_gemm_l1",), ("hc_coefficients", "hc_step")),
    _vector(Kernel.of("hc_sinkhorn", iters=20), "hc_coefficients", "hc_step", calls=("asc_vf_call",)),
)
