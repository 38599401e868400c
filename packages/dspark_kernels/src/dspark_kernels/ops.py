"""Public functions: checks, documentation, choice of the backend.

On an NVIDIA GPU values of parameters and row numbers are not checked, as that would wait for the device; rows of more
than 2^20 tokens, `top_logprobs` and `uniform` run as PyTorch's operators there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark_kernels import reference
from dspark_kernels.cuda import rows as cuda
from dspark_kernels.native import native as _native
from kernel_core import elsewhere, register_op, use_reference
from kernel_core.check import require
from kernel_core.check import tensor as check_tensor
from kernel_core.cuda import pointer

F32, I32, I64 = torch.float32, torch.int32, torch.int64
_PARAMETERS = {"t": ("temperature", "0 or more, finite"), "p": ("top_p", "above 0, at most 1"), "k": ("top_k", ">= 0")}


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    case: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row: temperature, then top-p, then top-k, renormalised, then the inverse cumulative distribution.

    logits float32 [T, V] (-inf = never); temperature float32 [T], below 1e-5 the exact argmax (the lowest id among
    equals, filters off); top_p float32 [T] in (0, 1]: the shortest prefix of the tokens in descending order that
    holds this mass, 1 = off; top_k int32 [T], 0 = off, None = off for all; seeds, positions int64 [T].

    The draw is `uniform(seeds, positions, case)`: a row's token depends on its logits, its parameters and these three
    numbers only, not on the batch. Equal logits are ordered by id.

    Returns tokens int64 [T] and the tokens' log-probabilities float32 [T] under the softmax of the given logits,
    before temperature and filters. A row with a NaN or +inf, or with no finite logit, has no distribution: its token
    is -1 and its log-probability NaN, and the caller has to fail that request.
    """
    check_tensor("logits", logits, dtype=F32, shape=(None, None))
    T, V = logits.shape
    values = check_sampling(T, V, temperature, top_p, top_k, seeds)
    _check_draw(seeds, positions, case, T)
    where = elsewhere("dspark_kernels.sample", logits, kernels=cuda.fits(logits))
    if where == "cuda":
        return cuda.sample(logits, temperature, top_p, top_k, seeds, positions, case)
    if where:
        return reference.sample(logits, temperature, top_p, top_k, seeds, positions, case=case)
    values()
    if use_reference():
        return reference.sample(logits, temperature, top_p, top_k, seeds, positions, case=case)
    tokens = torch.empty(T, dtype=I64)
    logprobs = torch.empty(T, dtype=F32)
    # fmt: off
    _native.sample(T, V, logits.data_ptr(), temperature.data_ptr(), top_p.data_ptr(), pointer(top_k),
                   seeds.data_ptr(), positions.data_ptr(), case, tokens.data_ptr(), logprobs.data_ptr())
    # fmt: on
    return tokens, logprobs


def top_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely tokens of each row, most likely first, the lower id first among equals.

    logits float32 [T, V]; k in [1, V]. Returns ids int64 [T, k] and log-probabilities float32 [T, k] under the
    softmax. Where fewer than k logits are finite, the rest is id -1 with -inf; a row without a distribution (see
    `sample`) is -1 with NaN.
    """
    check_tensor("logits", logits, dtype=F32, shape=(None, None))
    T, V = logits.shape
    _check_vocabulary(V)
    if not 1 <= k <= V:
        require(False, "k", k, f"1 to {V}")
    if use_reference() or elsewhere("dspark_kernels.top_logprobs", logits):
        return reference.top_logprobs(logits, k)
    ids = torch.empty(T, k, dtype=I64)
    logprobs = torch.empty(T, k, dtype=F32)
    _native.top_logprobs(T, V, k, logits.data_ptr(), ids.data_ptr(), logprobs.data_ptr())
    return ids, logprobs


def uniform(seeds: torch.Tensor, positions: torch.Tensor, case: int = 0) -> torch.Tensor:
    """Uniform numbers in (0, 1), both ends excluded, float64 [T]: a pure function of (seed, position, case).

    seeds, positions int64 [T]; case in [0, 8) numbers the independent draws at one position. A SplitMix64 word for
    each counter, keyed by the mixed seed; its 52 high bits choose a cell whose middle is returned.
    """
    _check_draw(seeds, positions, case, None)
    if use_reference() or elsewhere("dspark_kernels.uniform", seeds):
        return reference.uniform(seeds, positions, case)
    out = torch.empty(seeds.shape[0], dtype=torch.float64)
    _native.uniform(seeds.shape[0], seeds.data_ptr(), positions.data_ptr(), case, out.data_ptr())
    return out


def apply_token_mask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    logits float32 [T, V]; bitmask int32 [R, ceil(V / 32)]: bit v % 32 of word v / 32 allows token v; rows int64 [R]:
    the logits row of each mask, -1 = the mask is skipped, None for rows 0 to T - 1 (R = T).
    """
    check_tensor("logits", logits, dtype=F32, shape=(None, None))
    T, V = logits.shape
    R = T
    if rows is not None:
        check_tensor("rows", rows, dtype=I64, shape=(None,))
        R = rows.shape[0]
    words = (V + 31) // 32
    check_tensor("bitmask", bitmask, dtype=I32, shape=(R, words))
    where = elsewhere("dspark_kernels.apply_token_mask", logits, kernels=cuda.fits(logits))
    if where == "cuda":
        return cuda.apply_token_mask(logits, bitmask, rows)
    if where:
        return reference.apply_token_mask(logits, bitmask, rows)
    if use_reference():
        if rows is not None and R and not (int(rows.min()) >= -1 and int(rows.max()) < T):
            require(False, "rows", rows.tolist(), f"-1 to {T - 1}")
        return reference.apply_token_mask(logits, bitmask, rows)
    index = 0 if rows is None else rows.data_ptr()
    bad = _native.token_mask(T, R, V, words, logits.data_ptr(), bitmask.data_ptr(), index)
    if bad >= 0:
        assert rows is not None
        require(False, "rows", f"{rows[bad].item()} at {bad}", f"-1 to {T - 1}")
    return None


def check_sampling(
    T: int, V: int, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor | None, seeds: torch.Tensor
) -> Callable[[], None]:
    """Check dtypes and shapes of the parameters of T rows; the result checks their values, in CPU memory alone."""
    _check_vocabulary(V)
    check_tensor("temperature", temperature, dtype=F32, shape=(T,))
    check_tensor("top_p", top_p, dtype=F32, shape=(T,))
    if top_k is not None:
        check_tensor("top_k", top_k, dtype=I32, shape=(T,))
    check_tensor("seeds", seeds, dtype=I64, shape=(T,))

    def values() -> None:
        row, which = _native.bad_parameter(T, temperature.data_ptr(), top_p.data_ptr(), pointer(top_k))
        if row >= 0:
            name, allowed = _PARAMETERS[which]
            value = {"t": temperature, "p": top_p, "k": temperature if top_k is None else top_k}[which]
            require(False, name, f"{value[row].item()} in row {row}", allowed)

    return values


def _check_vocabulary(V: int) -> None:
    if not 1 <= V < 2**31:
        require(False, "logits", f"{V} columns", "1 to 2^31 - 1 columns")


def _check_draw(seeds: torch.Tensor, positions: torch.Tensor, case: int, T: int | None) -> None:
    check_tensor("seeds", seeds, dtype=I64, shape=(T,))
    check_tensor("positions", positions, dtype=I64, shape=seeds.shape)
    if not 0 <= case < reference.DRAWS:
        require(False, "case", case, f"0 to {reference.DRAWS - 1}")


register_op(
    "dspark_kernels",
    "sample(Tensor logits, Tensor temperature, Tensor top_p, Tensor? top_k, Tensor seeds, Tensor positions, *, "
    "int case=0) -> (Tensor, Tensor)",
    sample,
    lambda logits, *args, case=0: (logits.new_empty(len(logits), dtype=I64), logits.new_empty(len(logits))),
)
register_op(
    "dspark_kernels",
    "top_logprobs(Tensor logits, int k) -> (Tensor, Tensor)",
    top_logprobs,
    lambda logits, k: (logits.new_empty(len(logits), k, dtype=I64), logits.new_empty(len(logits), k)),
)
register_op(
    "dspark_kernels",
    "uniform(Tensor seeds, Tensor positions, int case=0) -> Tensor",
    uniform,
    lambda seeds, positions, case=0: seeds.new_empty(seeds.shape, dtype=torch.float64),
)
register_op(
    "dspark_kernels",
    "apply_token_mask(Tensor(a!) logits, Tensor bitmask, Tensor? rows=None) -> ()",
    apply_token_mask,
    lambda logits, bitmask, rows=None: None,
)
