"""Arguments that do not fit: named, with what came and what is allowed, before anything runs."""

from __future__ import annotations

import pytest
import torch

import cann_ops

F32, U8, I32, I64 = torch.float32, torch.uint8, torch.int32, torch.int64


def zeros(*shape, dtype=F32):
    return torch.zeros(*shape, dtype=dtype)


def bytes_(*shape):
    return zeros(*shape, dtype=U8)


CASES = [
    (cann_ops.kv_rows, (zeros(2, 500), None, 1.0, None), {}, "x: got 500 channels, allowed is 128, 256 or 512"),
    (cann_ops.kv_rows, (zeros(2, 512), None, 1.0, None), {"format": "other"}, "format: got 'other'"),
    (cann_ops.kv_rows, (zeros(2, 512), zeros(512), 0.0, None), {}, "eps: got 0.0"),
    (cann_ops.kv_rows, (zeros(2, 512), None, 1.0, zeros(2, 32)), {}, r"rope: got shape \[2, 32\]"),
    (cann_ops.kv_rows, (zeros(2, 512).half(), None, 1.0, None), {}, "x: got dtype torch.float16"),
    (cann_ops.kv_rows, (zeros(512, 2).T, None, 1.0, None), {}, "x: got strides"),
    (cann_ops.norm_quantize, (zeros(2, 1000), None), {}, "x: got 1000 columns"),
    (cann_ops.store_main, (bytes_(2, 8), bytes_(1, 4, 9), zeros(2, dtype=I64)), {}, "pages: got shape"),
    (cann_ops.store_main, (bytes_(2, 8), bytes_(1, 4, 8), zeros(2, dtype=I32)), {}, "slots: got dtype"),
    (cann_ops.store_index, (bytes_(2, 17), bytes_(1, 68), zeros(2, dtype=I64), 4), {}, "17 bytes a row"),
    (cann_ops.route, (zeros(2, 2000), zeros(2000), 6), {}, "logits: got 2000 experts"),
    (cann_ops.route, (zeros(2, 8), zeros(8), 9), {}, "top_k: got 9, allowed is 1 to 8"),
    (cann_ops.route, (zeros(2, 8), zeros(8), 2), {"bias_vl": zeros(8)}, "bias_vl, is_image: got one of them"),
    (cann_ops.swiglu_quantize, (zeros(2, 300), zeros(2)), {}, "gate_up: got 300 columns"),
    (cann_ops.swiglu_quantize, (zeros(2, 512), zeros(3)), {}, r"weights: got shape \[3\]"),
    (cann_ops.swiglu_quantize, (zeros(2, 512), zeros(2)), {"limit": 0.0}, "limit: got 0.0"),
    (cann_ops.select_top, (zeros(2, 9), zeros(2, dtype=I32), 0), {}, "k: got 0, allowed is 1 to 4096"),
    (cann_ops.hc_mix, (zeros(2, 3, 64), zeros(2, 4), None), {}, r"X: got shape \[2, 3, 64\]"),
    (cann_ops.hc_mix, (zeros(2, 4, 65), zeros(2, 4), None), {}, "X: got 65 channels"),
    (
        cann_ops.hc_coefficients, (zeros(2, 4, 64), zeros(24, 256), zeros(24), zeros(3)), {"iters": 0},
        "iters: got 0, allowed is 1 to 64",
    ),
    (
        cann_ops.hc_step,
        (zeros(2, 4, 64), zeros(2, 64), None, None, zeros(24, 256), zeros(24), zeros(3), zeros(2, 4), None), {},
        "y, post, comb: got some",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "op, arguments, options, said", CASES, ids=[f"{c[0].__name__}-{i}" for i, c in enumerate(CASES)]
)
def test_the_argument_is_named(op, arguments, options, said):
    with pytest.raises(ValueError, match=said), cann_ops.host_emulation():
        op(*arguments, **options)


def mx(n=2, k=256, experts=1, columns=128, packed=True):
    weight = zeros(experts, columns, k // 2 if packed else k, dtype=U8)
    codes = zeros(n, k, dtype=U8).view(torch.float8_e4m3fn)
    first = zeros(experts + 1, dtype=I32)
    return [codes, zeros(n, k // 32, dtype=U8), first, weight, zeros(experts, columns, k // 32, dtype=U8)]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"k": 128}, "codes: got 128 columns"),
        ({"columns": 100}, "weight: got 100 rows"),
        ({1: zeros(2, 7, dtype=U8)}, "scales: got shape"),
        ({2: zeros(5, dtype=I32)}, "first: got shape"),
        ({3: zeros(1, 128, 100, dtype=U8)}, "weight: got shape"),
        ({4: zeros(1, 128, 9, dtype=U8)}, "weight_scales: got shape"),
    ],
)
def test_products_name_the_argument(change, said):
    arguments = mx(**{k: v for k, v in change.items() if isinstance(k, str)})
    for at, value in change.items():
        if isinstance(at, int):
            arguments[at] = value
    with pytest.raises(ValueError, match=said), cann_ops.host_emulation():
        cann_ops.mx_linear(*arguments)


def test_a_wrong_slot_is_named_by_the_reference_before_it_writes():
    import kernel_core

    pages = zeros(1, 4, 8, dtype=U8)
    with kernel_core.using("reference"), pytest.raises(ValueError, match=r"slots\[1\]: got 4, allowed is -1 to 3"):
        cann_ops.store_main(torch.ones(2, 8, dtype=U8), pages, torch.tensor([0, 4]))
    assert (pages == 0).all()
