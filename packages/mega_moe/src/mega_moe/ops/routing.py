"""Choosing the experts of each token."""

from __future__ import annotations

import torch

import kernel_core
from kernel_core import check
from mega_moe import reference
from mega_moe.cuda import route as cuda_route
from mega_moe.native import native


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    bias_vl: torch.Tensor | None = None,
    is_image: torch.Tensor | None = None,
    routed_scale: float = 1.5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each token by sqrt(softplus(logit)) + bias.

    logits: float32 [T, E]. bias: float32 [E], used for selection only; bias_vl takes its place for rows where
    is_image (bool [T]) is set. top_k: 1 to E.
    Returns ids int32 [T, top_k] by descending biased score (a tie goes to the lower id) and weights float32
    [T, top_k] = s / (sum of the chosen s + 1e-20) * routed_scale, s without bias.
    With top_k = 1 the division still takes place, so the weight is routed_scale (some implementations leave the
    single score undivided; a model with one expert a token has to know which it was trained with).
    A NaN logit ranks below every number: its expert is taken only where fewer than top_k others exist, and then
    the row's weights are NaN. Scores neither overflow for large logits nor reach 0 before a logit of -174.
    On an NVIDIA GPU a kernel takes up to 1024 experts and 32 slots; beyond, PyTorch's operators run.
    Raises ValueError for wrong shapes, dtypes, top_k, or bias_vl without is_image (and the reverse).
    """
    check.tensor("logits", logits, dtype=torch.float32, shape=(None, None))
    tokens, experts = logits.shape
    check.tensor("bias", bias, dtype=torch.float32, shape=(experts,))
    check.require(1 <= top_k <= experts, "top_k", top_k, f"1 to the {experts} experts of logits")
    vl_pointer = image_pointer = 0
    if bias_vl is None or is_image is None:
        check.require(bias_vl is None and is_image is None, "bias_vl, is_image", "one of them", "both or none")
    else:
        check.tensor("bias_vl", bias_vl, dtype=torch.float32, shape=(experts,))
        check.tensor("is_image", is_image, dtype=torch.bool, shape=(tokens,))
        vl_pointer, image_pointer = bias_vl.data_ptr(), is_image.data_ptr()
    where = "library" if kernel_core.use_reference() else kernel_core.elsewhere("mega_moe.route", logits, kernels=True)
    if where == "cuda" and cuda_route.fits_route(experts, top_k):
        return cuda_route.route(logits, bias, top_k, bias_vl=bias_vl, is_image=is_image, routed_scale=routed_scale)
    if where:
        return reference.route(logits, bias, top_k, bias_vl=bias_vl, is_image=is_image, routed_scale=routed_scale)
    ids = torch.empty((tokens, top_k), dtype=torch.int32)
    weights = torch.empty((tokens, top_k))
    native.route(
        logits.data_ptr(),
        bias.data_ptr(),
        vl_pointer,
        image_pointer,
        ids.data_ptr(),
        weights.data_ptr(),
        tokens,
        experts,
        top_k,
        routed_scale,
    )
    return ids, weights


def _fake(logits, bias, top_k, bias_vl=None, is_image=None, routed_scale=1.5):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


kernel_core.register_op(
    "mega_moe",
    "route(Tensor logits, Tensor bias, int top_k, Tensor? bias_vl=None, Tensor? is_image=None, "
    "float routed_scale=1.5) -> (Tensor, Tensor)",
    lambda logits, bias, top_k, bias_vl=None, is_image=None, routed_scale=1.5: route(
        logits, bias, top_k, bias_vl=bias_vl, is_image=is_image, routed_scale=routed_scale
    ),
    _fake,
)
