"""The running softmax of Triton attention kernels over keys that are their own values, in even and odd channels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def absorb(q_even, q_odd, k_even, k_odd, known, scale, top, total, even, odd):
    """Take some keys into the running maximum, sum and weighted keys; returns all four.

    q [M, D/2], keys [keys, D/2], both of the dtype that products take; known bool [keys]; top, total float32 [M];
    even, odd float32 [M, D/2]. Keys that are not known are zeros and add exactly nothing.
    """
    s = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
    s = (s + tl.dot(q_odd, tl.trans(k_odd), input_precision="ieee")) * scale
    s = tl.where(known[None, :], s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    safe_top = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp(top - safe_top)
    p = tl.exp(s - safe_top[:, None])
    total = total * shrink + tl.sum(p, 1)
    p = p.to(k_even.dtype)
    even = even * shrink[:, None] + tl.dot(p, k_even, input_precision="ieee")
    odd = odd * shrink[:, None] + tl.dot(p, k_odd, input_precision="ieee")
    return new, total, even, odd
