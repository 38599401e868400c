"""Index scores, exact top-k and both together on an NVIDIA GPU: long contexts, 32 heads, DeepGEMM and torch beside."""

from __future__ import annotations

import functools
from collections.abc import Callable

import peers
import torch
from bench_attention_cuda import INDEX_DIM, INDEX_HEADS, SOURCES, index_arguments

from kernel_core.bench import Bench, Case, Offer, Problem
from kernel_core.bench.device import address, assert_near, cuda_module, multiprocessors, stream

K = 512
KEY_BYTES = INDEX_DIM // 2 + INDEX_DIM // 32
_CHECKED = 8192  # keys from either end that are compared with the reference


def _arguments(requests: int, rows: int, keys: int) -> dict:
    """As `index_arguments`, with `rows` queries for each request."""
    arguments = index_arguments(requests, keys, "cuda")
    if rows > 1:
        g = torch.Generator("cuda").manual_seed(rows)
        total = requests * rows
        arguments |= {
            "q": torch.randn(total, INDEX_HEADS, INDEX_DIM, generator=g, device="cuda"),
            "head_weights": torch.randn(total, INDEX_HEADS, generator=g, device="cuda"),
            "cu_seqlens": torch.arange(0, total + 1, rows, device="cuda").int(),
            "visible": torch.full((total,), keys, dtype=torch.int32, device="cuda"),
        }
    return arguments


def _compiled_scores(arguments: dict, scores: torch.Tensor) -> Callable[[], None] | None:
    module = cuda_module("mla_fp4._cuda", "index_score")
    if module is None:
        return None
    rows, heads = arguments["q"].shape[:2]
    requests = len(arguments["cu_seqlens"]) - 1
    size = module.index_score_workspace(rows, heads) + 16
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")

    def run() -> None:
        module.index_score(
            q=address(arguments["q"]),
            weights=address(arguments["head_weights"]),
            q_is_bf16=False,
            rows=rows,
            heads=heads,
            pages=address(arguments["pages"]),
            blocks=arguments["pages"].shape[0],
            rows_per_block=arguments["rows_per_block"],
            block_table=address(arguments["block_table"]),
            table_width=arguments["block_table"].shape[1],
            cu_seqlens=address(arguments["cu_seqlens"]),
            batch=requests,
            visible=address(arguments["visible"]),
            longest_request=rows // requests,
            width=scores.shape[1],
            scores=address(scores),
            stride=scores.stride(0),
            workspace=address(workspace),
            stream=stream(),
        )

    return run


def _compiled_topk(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    module = cuda_module("mla_fp4._cuda", "topk")
    if module is None:
        raise NotImplementedError("top-k: mla_fp4._cuda is not built, and there is no other implementation")
    (rows, width), k = scores.shape, out.shape[1]
    slices = module.topk_slices(rows, width, k, multiprocessors())
    workspace = torch.empty(module.topk_workspace(rows, k, slices) + 16, dtype=torch.uint8, device="cuda")

    def run() -> None:
        module.topk(
            scores=address(scores),
            stride=scores.stride(0),
            lengths=address(lengths),
            rows=rows,
            width=width,
            k=k,
            out=address(out),
            slices=slices,
            workspace=address(workspace),
            stream=stream(),
        )

    return run


def keys_between(arguments: dict, row: int, first: int, end: int) -> dict:
    """The problem of one row on the CPU whose keys are `first` to `end` of its request; whole blocks."""
    size = arguments["rows_per_block"]
    request = int(torch.searchsorted(arguments["cu_seqlens"], row, right=True)) - 1
    blocks = arguments["block_table"][request, first // size : end // size].long()
    return {
        "q": arguments["q"][row : row + 1].cpu(),
        "head_weights": arguments["head_weights"][row : row + 1].cpu(),
        "pages": arguments["pages"][blocks].cpu(),
        "rows_per_block": size,
        "block_table": torch.arange(len(blocks), dtype=torch.int32)[None],
        "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32),
        "visible": torch.tensor([end - first], dtype=torch.int32),
    }


def _check_scores(arguments: dict, scores: torch.Tensor) -> None:
    from mla_fp4.reference.indexer import index_scores

    rows, keys = scores.shape
    for row in sorted({0, rows - 1}):
        for first in sorted({0, max(0, keys - _CHECKED)}):
            end = min(keys, first + _CHECKED)
            expected = index_scores(**keys_between(arguments, row, first, end))
            assert_near(f"index_scores, row {row}", scores[row : row + 1, first:end], expected, 1e-4)


def _check_topk(scores: torch.Tensor, out: torch.Tensor) -> None:
    from mla_fp4.reference.indexer import select_top

    for row in sorted({0, len(out) - 1}):
        lengths = torch.tensor([scores.shape[1]], dtype=torch.int32)
        expected = select_top(scores[row : row + 1].cpu(), lengths, out.shape[1])
        if not torch.equal(out[row : row + 1].cpu(), expected):
            raise ArithmeticError(f"top-k: row {row} differs from the reference, which is exact")


def _triton(arguments: dict, keys: int) -> Callable[[], torch.Tensor]:
    from mla_fp4 import triton_index

    return functools.partial(triton_index.index_scores, **arguments, width=keys)


def _checked_triton(arguments: dict, keys: int) -> Callable[[], torch.Tensor]:
    run = _triton(arguments, keys)
    _check_scores(arguments, run())
    return run


def _flops(rows: int, keys: int) -> int:
    return 2 * rows * keys * INDEX_HEADS * INDEX_DIM


def _deep_gemm(requests: int, rows: int, keys: int, k: int = 0) -> Offer:
    if rows == 1:
        return peers.deep_gemm_decode(requests, keys, INDEX_HEADS, k)
    return peers.deep_gemm_prefill(rows, keys, INDEX_HEADS, k)


def _scores(requests: int, rows: int, keys: int) -> Problem:
    arguments, total = _arguments(requests, rows, keys), requests * rows
    scores = torch.empty(total, keys, device="cuda")
    run = _compiled_scores(arguments, scores)
    others = [_deep_gemm(requests, rows, keys)]
    native: Callable[[], object]
    if run is None:
        native, check = _triton(arguments, keys), lambda: _check_scores(arguments, _triton(arguments, keys)())
    else:
        native, check = run, lambda: _check_scores(arguments, scores)
        others.insert(0, Offer("triton", functools.partial(_checked_triton, arguments, keys), "triton"))
    return Problem(
        native,
        None,
        requests * keys * KEY_BYTES + total * keys * 4,  # keys in, float32 scores out
        _flops(total, keys),
        peers=others,
        check=check,
        compute="fp8",  # a code times its scale's step is exact in FP8
        cold=True,
        note="cuda" if run is not None else "triton",
    )


def _both(requests: int, rows: int, keys: int) -> Problem:
    """Scores, then the `K` best: what the op does. The bound leaves the scores out, which need not be written."""
    arguments, total = _arguments(requests, rows, keys), requests * rows
    scores, out = torch.empty(total, keys, device="cuda"), torch.empty(total, K, dtype=torch.int32, device="cuda")
    score, choose = _compiled_scores(arguments, scores), _compiled_topk(scores, arguments["visible"], out)
    if score is None:
        raise NotImplementedError("index_topk: mla_fp4._cuda has no index_score")

    def run() -> None:
        score()
        choose()

    return Problem(
        run,
        None,
        requests * keys * KEY_BYTES + total * K * 4,
        _flops(total, keys),
        peers=[_deep_gemm(requests, rows, keys, K)],
        check=lambda: _check_topk(scores, out),
        compute="fp8",
        cold=True,
        note="cuda",
    )


def _topk(rows: int, width: int) -> Problem:
    g = torch.Generator("cuda").manual_seed(width)
    scores = torch.randn(rows, width, generator=g, device="cuda")
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, K, dtype=torch.int32, device="cuda")
    return Problem(
        _compiled_topk(scores, lengths, out),
        None,
        rows * (width * 4 + K * 4),
        0,
        peers=[peers.torch_topk(scores, K)],
        check=lambda: _check_topk(scores, out),
        cold=True,
        note="cuda",
    )


_LONG = 1 << 20
_SHAPES = (
    ("decode_b64_k65536", 64, 1, 65536),
    ("decode_b1_k1048576", 1, 1, _LONG),
    ("prefill_q8192_k65536", 1, 8192, 65536),
)


def _index_case(prefix: str, make: Callable[[int, int, int], Problem], name: str, *sizes: int) -> Case:
    shape = dict(zip(("requests", "rows", "keys"), sizes, strict=True)) | {"heads": INDEX_HEADS, "dim": INDEX_DIM}
    return Case(f"{prefix}_{name}", shape, functools.partial(make, *sizes))


BENCHES = [
    Bench("mla_fp4.index_scores", [_index_case("index", _scores, *s) for s in _SHAPES], SOURCES, device="cuda"),
    Bench("mla_fp4.index_topk", [_index_case("index_topk", _both, *s) for s in _SHAPES], SOURCES, device="cuda"),
    Bench(
        "mla_fp4.select_top",
        [
            Case(
                f"topk{K}_r{rows}_k{width}",
                {"rows": rows, "width": width, "k": K},
                functools.partial(_topk, rows, width),
            )
            for rows, width in ((128, 65536), (128, 8192), (1, _LONG))
        ],
        SOURCES,
        device="cuda",
    ),
]
