"""Row writers, norm with rotation, pooling and stores on an NVIDIA GPU: 8192 tokens of prefill, bound by bytes."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from bench_attention_cuda import SOURCES

from kernel_core import formats, using
from kernel_core.bench import Bench, Case, Problem
from kernel_core.bench.device import address, assert_near, cuda_module, stream

TOKENS, DIM, INDEX_DIM, ROPE, ROWS_PER_BLOCK, EPS = 8192, 512, 128, 64, 128, 1e-6
CHECKED = 64
_FORMATS = {"main": (0, DIM, 288), "window": (1, DIM, 528), "index": (2, INDEX_DIM, 68)}  # number, width, row bytes


def _module(function: str) -> ModuleType:
    module = cuda_module("mla_fp4._cuda", function)
    if module is None:
        raise NotImplementedError(f"{function}: mla_fp4._cuda is not built, and there is no other implementation")
    return module


def _normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def _angles(tokens: int) -> torch.Tensor:
    angle = 100 * _normal(tokens, ROPE // 2, seed=2)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def _slots(tokens: int) -> torch.Tensor:
    return torch.randperm(tokens, generator=torch.Generator("cuda").manual_seed(1), device="cuda")


def _bytes_bound(run: functools.partial, moved: int, check: functools.partial) -> Problem:
    return Problem(lambda: run(stream=stream()), None, moved, 0, check=check, cold=True, note="cuda")


def _kv_rows(format: str) -> Problem:
    import mla_fp4

    number, d, size = _FORMATS[format]
    x, weight, rope = _normal(TOKENS, d, dtype=torch.bfloat16), torch.rand(d, device="cuda") + 0.5, _angles(TOKENS)
    slots, per_block = _slots(TOKENS), ROWS_PER_BLOCK if format == "index" else 0
    out = torch.zeros(TOKENS, size, dtype=torch.uint8, device="cuda")
    run = functools.partial(
        _module("kv_rows").kv_rows, address(x), address(weight), address(rope), address(slots), address(out), TOKENS, d,
        ROPE, TOKENS, per_block, EPS, number, True, 1,
    )  # fmt: skip

    def check() -> None:
        pages = out.view(-1, ROWS_PER_BLOCK * size)
        rows = formats.index_page_rows(pages, ROWS_PER_BLOCK).reshape(TOKENS, size) if per_block else out
        few = slice(TOKENS - CHECKED, TOKENS)
        with using("reference"):
            expected = mla_fp4.kv_rows(
                x[few].float().cpu(), weight.cpu(), EPS, rope[few].cpu(), format=format, round_bf16=True
            )
        differing = float((rows[slots[few]].cpu() != expected).float().mean())
        if not differing < 0.01:  # the norm's sum may round a value to the neighbouring code
            raise ArithmeticError(f"kv_rows: {differing:.2%} of the bytes differ from the reference")

    return _bytes_bound(run, TOKENS * (d * 2 + ROPE * 4 + 8 + size), check)


def _norm_rope(tokens: int, group: int, norm: bool) -> Problem:
    import mla_fp4

    x, rope = _normal(tokens, group, DIM, dtype=torch.bfloat16), _angles(tokens)
    weight = torch.rand(DIM, device="cuda") + 0.5 if norm else None
    out = torch.empty_like(x)
    run = functools.partial(
        _module("norm_rope").norm_rope, address(x), address(weight), address(rope), address(out), tokens, group, DIM,
        ROPE, EPS, False, 1, 1,
    )  # fmt: skip

    def check() -> None:
        few = slice(tokens - CHECKED, tokens)
        w = None if weight is None else weight.cpu()
        with using("reference"):
            expected = mla_fp4.norm_rope(x[few].float().cpu(), w, EPS, rope[few].cpu())
        assert_near("norm_rope", out[few], expected, 6e-3)

    return _bytes_bound(run, tokens * (2 * group * DIM * 2 + ROPE * 4), check)


def _compress() -> Problem:
    import mla_fp4

    kv, gate = _normal(TOKENS, DIM), 5 * _normal(TOKENS, DIM, seed=1)
    tail = torch.zeros(2, 7, 2, DIM, device="cuda")
    slot, start = torch.ones(1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    cu, out = torch.tensor([0, TOKENS], device="cuda").int(), torch.empty(TOKENS // 2, DIM, device="cuda")
    run = functools.partial(
        _module("compress").compress, address(kv), address(gate), address(tail), address(slot), address(cu),
        address(start), address(out), 1, TOKENS, DIM, len(tail), tail.shape[1], len(out),
    )  # fmt: skip

    def check() -> None:
        host = [t.cpu() for t in (kv[:CHECKED], gate[:CHECKED], torch.zeros_like(tail), slot)]
        with using("reference"):
            expected = mla_fp4.compress(*host, torch.tensor([0, CHECKED], dtype=torch.int32), start.cpu())
        assert_near("compress", out[: CHECKED // 2], expected, 1e-5)

    return _bytes_bound(run, TOKENS * DIM * 4 * 2 + TOKENS // 2 * DIM * 4, check)


def _store(format: str) -> Problem:
    import mla_fp4

    _, _, size = _FORMATS[format]
    rows = torch.randint(0, 256, (TOKENS, size), dtype=torch.uint8, device="cuda")
    slots, pages = (
        _slots(TOKENS),
        torch.zeros(TOKENS // ROWS_PER_BLOCK, ROWS_PER_BLOCK * size, dtype=torch.uint8, device="cuda"),
    )
    scales, per_block = (INDEX_DIM // 32, ROWS_PER_BLOCK) if format == "index" else (0, 0)
    run = functools.partial(
        _module("store_rows").store_rows, address(rows), address(slots), address(pages), TOKENS, size - scales, scales,
        per_block, TOKENS,
    )  # fmt: skip

    def check() -> None:
        expected = torch.zeros_like(pages, device="cpu")
        with using("reference"):
            if per_block:
                mla_fp4.store_index(rows.cpu(), expected, slots.cpu(), per_block)
            else:
                mla_fp4.store_main(rows.cpu(), expected.view(-1, ROWS_PER_BLOCK, size), slots.cpu())
        if not torch.equal(pages.cpu(), expected):
            raise ArithmeticError(f"store_{format}: the pages differ from the reference's")

    return _bytes_bound(run, TOKENS * (2 * size + 8), check)


def _bench(op: str, *cases: Case) -> Bench:
    return Bench(f"mla_fp4.{op}", cases, SOURCES, device="cuda")


_HEADS = {"tokens": TOKENS // 4, "heads": 64, "dim": DIM}
BENCHES = [
    _bench(
        "kv_rows",
        *(
            Case(
                f"rows_{name}_t{TOKENS}",
                {"tokens": TOKENS, "dim": d, "format": name},
                functools.partial(_kv_rows, name),
            )
            for name, (_, d, _) in _FORMATS.items()
        ),
    ),
    _bench(
        "norm_rope",
        Case(f"norm_rope_d{DIM}_t{TOKENS}", {"tokens": TOKENS, "dim": DIM}, lambda: _norm_rope(TOKENS, 1, True)),
        Case("rope_h64_t2048", _HEADS, lambda: _norm_rope(TOKENS // 4, 64, False)),
    ),
    _bench("compress", Case(f"pool_t{TOKENS}", {"tokens": TOKENS, "dim": DIM}, _compress)),
    *(
        _bench(f"store_{name}", Case(f"store_{name}_t{TOKENS}", {"tokens": TOKENS}, functools.partial(_store, name)))
        for name in ("main", "index")
    ),
]
