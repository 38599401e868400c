"""Humming (humming-kernels) at our points: both products of all experts and the clamped SwiGLU between them.

No router, no sum of slots, rows already in the order of experts. Imported only when a case asks for it; makes its own
random weights in its own layout. One expert's first product is compared with plain PyTorch before anything is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kernel_core import formats
from kernel_core.bench import Offer
from kernel_core.bench.device import assert_near

PACKAGE = "humming-kernels"
INPUTS = {"W4A16": None, "W4A8": {"dtype": "float8e4m3", "group_size": 0}}
_SWIGLU = "fminf(a, 10.0f) / (1.0f + __expf(-fminf(a, 10.0f))) * fminf(fmaxf(b, -10.0f), 10.0f)"
_LIMIT = {"W4A16": 1e-2, "W4A8": 6e-2}


def humming(kind: str, experts: int, each: int, d: int, inter: int) -> Offer:
    """`each` rows of every expert; `kind` of `INPUTS`."""
    return Offer(f"Humming {kind}", functools.partial(_chain, kind, experts, each, d, inter), PACKAGE)


class _Product:
    """One grouped product with its weights."""

    def __init__(self, kind: str, experts: int, each: int, n: int, k: int) -> None:
        from humming.kernel.humming import HummingKernel
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        given = INPUTS[kind]
        with torch.device("cuda"):
            self.layer = HummingLayer(
                shape_n=n, shape_k=k, weight_config={"quant_method": "mxfp4"},
                input_config=None if given is None else dict(given), num_experts=experts, torch_dtype=torch.bfloat16,
            )  # fmt: skip
        self.layer = self.layer.to("cuda")
        weight = torch.randint(0, 256, self.layer.weight.shape, dtype=torch.uint8, device="cuda")
        scale = torch.randint(117, 122, self.layer.weight_scale.shape, dtype=torch.uint8, device="cuda")
        self.last = weight[-1].clone(), scale[-1].clone()
        self.layer.load_from_tensors({"weight": weight, "weight_scale": scale})
        self.layer.transform()
        config = self.layer.humming_config
        kind_of = "grouped_contiguous"
        tuned = dict(get_heuristics_config(config, shape_m=experts * each, gemm_type=kind_of))
        rows = HummingKernel.prepare_kernels(config.to_str(), {"gemm_type": kind_of}, [(0, 1 << 30, tuned)])
        self.row = rows.reshape(-1, 4)[0].contiguous()
        self.layout = (torch.arange(experts + 1, device="cuda") * each).long()
        self.out = torch.empty(experts * each, n, device="cuda", dtype=torch.bfloat16)

    def __call__(self, x: torch.Tensor, **options: object) -> torch.Tensor:
        from humming import ops
        from humming.forward import may_process_input

        layer = self.layer
        rows, groups, tokens = may_process_input(layer.humming_config, x, **options)
        ops.launch_kernel(
            configs=self.row, inputs=rows, weight=layer.weight, weight_scale=layer.weight_scale,
            weight_scale_2=getattr(layer, "weight_scale_2", None), input_scale=tokens if groups is None else groups,
            outputs=self.out, locks=layer.locks, top_k=1, sorted_ids=None, expert_ids=None, num_tokens_padded=None,
            expert_layout=self.layout,
        )  # fmt: skip
        return self.out


def _chain(kind: str, experts: int, each: int, d: int, inter: int) -> Callable[[], object]:
    from humming import ops

    ops.utils.init_humming_launcher()
    first, second = (_Product(kind, experts, each, n, k) for n, k in ((2 * inter, d), (d, inter)))
    x = torch.randn(experts * each, d, device="cuda", dtype=torch.bfloat16)
    got = first(x)[-each:]
    expected = x[-each:].float() @ formats.dequantize_mxfp4(*first.last).T
    assert_near(f"Humming {kind}", got, expected, _LIMIT[kind])

    def run() -> torch.Tensor:
        return second(first(x), activation_type="binary_split", activation_impl=_SWIGLU)

    return run
