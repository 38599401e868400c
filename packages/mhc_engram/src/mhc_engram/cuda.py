"""The ops on an NVIDIA GPU: tensors to the pointers and sizes of the compiled module.

Arguments come checked by the ops. A function `fits_...` says whether a kernel takes these tensors; where none does, the
op runs PyTorch's operators (`mhc_engram.reference`). Nothing here waits for the device, so that CUDA graphs can hold
it.
"""

from __future__ import annotations

import torch

from kernel_core.cuda import aligned, cuda_module, multiprocessors, pointer, same_device, stream

Coefficients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_MOST_CHANNELS = 16384  # of hyper-connections: a tile of tokens has to fit in shared memory
_REST = (8, 0)  # warps of a CTA and how clusters take tiles, where a shape does not say
_MOST_INJECTED = 8192
_MOST_PIECES = 2**31 - 1  # of 128 values, in a lookup
_HOST_BLOCKS = 32  # enough to fill the link to the host; more would only take multiprocessors from others


def fits_hyper_connection(X: torch.Tensor, *others: torch.Tensor | None) -> bool:
    return X.shape[2] <= _MOST_CHANNELS and aligned(X, *others)


def hyper_connection(
    X: torch.Tensor,
    *,
    update: Coefficients | None = None,
    parameters: Coefficients | None = None,
    coefficients: Coefficients | None = None,
    pre_mix: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    mixed: torch.Tensor | None = None,
    quantized: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    norm_eps: float = 0.0,
    hc_eps: float = 0.0,
    iters: int = 1,
    shape: tuple[int, ...] | None = None,
) -> None:
    """One launch for any of the three parts of `mhc_engram.hc_step`.

    update: (y, post, comb). parameters: (fn, base, scale), with `coefficients` as output. pre_mix with `mixed`, or
    with `quantized` (E4M3 codes [T, d], UE8M0 scales [T, d / 32], the groups of `formats.quantize_window`), or both as
    output. shape: CTAs that share a token (1, 2, 4, 8, 16), tokens of a tile (1 to 16), warps of a CTA (4, 8) and how
    clusters take tiles: 0, one and no more; 1, they stay and take tiles in turn (4 CTAs and more of 8 warps; tiles of
    up to 48 tokens with 8 CTAs at 5120 channels); 2, so that `fn` stays in shared memory too (16 CTAs, 32 tokens, 5120
    channels). Chosen here where None; results do not depend on it.
    """
    T, _, d = X.shape
    y, post, comb = update or (None, None, None)
    fn, base, scale = parameters or (None, None, None)
    pre_out, post_out, comb_out = coefficients or (None, None, None)
    codes, code_scales = quantized or (None, None)
    same_device(
        X, y=y, post=post, comb=comb, fn=fn, base=base, scale=scale, pre_out=pre_out, post_out=post_out,
        comb_out=comb_out, pre_mix=pre_mix, norm_weight=norm_weight, out=mixed, codes=codes, code_scales=code_scales,
    )  # fmt: skip
    if T == 0:
        return
    module = cuda_module("mhc_engram")
    chosen: tuple[int, ...] = module.hc_shape(T, d, multiprocessors(X.device)) if shape is None else shape
    cluster, tile, warps, stay = (*chosen, *_REST[len(chosen) - 2 :])
    module.hc_step(
        tokens=T,
        channels=d,
        streams=X.data_ptr(),
        y=pointer(y),
        post=pointer(post),
        comb=pointer(comb),
        fn=pointer(fn),
        base=pointer(base),
        scale=pointer(scale),
        pre_out=pointer(pre_out),
        post_out=pointer(post_out),
        comb_out=pointer(comb_out),
        pre_mix=pointer(pre_mix),
        norm_weight=pointer(norm_weight),
        mixed=pointer(mixed),
        codes=pointer(codes),
        code_scales=pointer(code_scales),
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        eps=eps,
        iters=iters,
        cluster=cluster,
        tile=tile,
        warps=warps,
        stay=stay,
        stream=stream(X.device),
    )


def engram_rows(
    mapped: torch.Tensor,
    dead: torch.Tensor,
    history: torch.Tensor,
    cu_seqlens: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad_mapped: int,
) -> torch.Tensor:
    same_device(
        mapped, dead=dead, history=history, cu_seqlens=cu_seqlens, multipliers=multipliers, primes=primes,
        offsets=offsets,
    )  # fmt: skip
    tokens, orders = mapped.shape[0], multipliers.shape[0] - 1
    out = torch.empty(tokens, primes.shape[0], dtype=torch.int64, device=mapped.device)
    if tokens:
        cuda_module("mhc_engram").engram_rows(
            tokens=tokens,
            requests=history.shape[0],
            orders=orders,
            heads=primes.shape[0] // orders,
            mapped=mapped.data_ptr(),
            dead=dead.data_ptr(),
            history=history.data_ptr(),
            cu_seqlens=cu_seqlens.data_ptr(),
            multipliers=multipliers.data_ptr(),
            primes=primes.data_ptr(),
            offsets=offsets.data_ptr(),
            pad_mapped=pad_mapped,
            rows=out.data_ptr(),
            stream=stream(mapped.device),
        )
    return out


def fits_engram_gather(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None) -> bool:
    pieces = rows.numel() * -(-table.shape[1] // 128)
    return pieces <= _MOST_PIECES and aligned(out) and table.data_ptr() % 4 == 0


def engram_gather(
    table: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None, *, blocks: int | None = None
) -> torch.Tensor:
    """`table` and `scale` lie on the device of `rows`, or both in pinned host memory, which the kernel reads itself.

    blocks: as many as there is work where 0; chosen by where the table lies where None.
    """
    on_host = table.is_cpu
    if on_host:
        for name, tensor in (("table", table), ("scale", scale)):
            if not (tensor.is_cpu and tensor.is_pinned()):
                raise ValueError(f"{name}: got memory that is not pinned, allowed is pinned memory or {rows.device}")
    else:
        same_device(rows, table=table, scale=scale)
    same_device(rows, out=out)
    (T, C), dim = rows.shape, table.shape[1]
    result = torch.empty(T, C * dim, device=rows.device) if out is None else out
    if rows.numel():
        cuda_module("mhc_engram").engram_gather(
            count=T * C,
            dim=dim,
            table_rows=table.shape[0],
            table=table.data_ptr(),
            scale=scale.data_ptr(),
            rows=rows.data_ptr(),
            out=result.data_ptr(),
            blocks=(_HOST_BLOCKS if on_host else 0) if blocks is None else blocks,
            stream=stream(rows.device),
        )
    return result


def fits_engram_inject(X: torch.Tensor, kv: torch.Tensor, qk_weight: torch.Tensor) -> bool:
    return X.shape[2] <= _MOST_INJECTED and aligned(X, kv, qk_weight)


def engram_inject(
    X: torch.Tensor, kv: torch.Tensor, qk_weight: torch.Tensor, dead: torch.Tensor | None, eps: float
) -> None:
    same_device(X, kv=kv, qk_weight=qk_weight, dead=dead)
    tokens, streams, channels = X.shape
    if X.numel():
        cuda_module("mhc_engram").engram_inject(
            tokens=tokens,
            streams=streams,
            channels=channels,
            x=X.data_ptr(),
            kv=kv.data_ptr(),
            qk_weight=qk_weight.data_ptr(),
            dead=pointer(dead),
            eps=eps,
            stream=stream(X.device),
        )
