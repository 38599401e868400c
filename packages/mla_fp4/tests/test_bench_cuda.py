"""The GPU benches' problems, built small on the CPU: valid for the ops, with the bytes and operations they state."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mla_fp4
from kernel_core.bench import Bench, Case, Problem, check_case
from kernel_core.testing.bindings import FakeModule


@pytest.fixture
def load(monkeypatch):
    """A function that loads a bench file, which finds its neighbours as it does under the runner."""
    folder = Path(__file__).parents[1] / "bench"
    monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)

    def loaded(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield loaded
    for name in set(sys.modules) - known:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def bench(load) -> ModuleType:
    return load("bench_attention_cuda")


def test_attention_problems_are_valid(bench):
    arguments = bench.attention_arguments(2, 1, 4, "cpu", visible=1024)
    out = mla_fp4.sparse_attention(**{**arguments, "q": arguments["q"].float()})
    assert out.isfinite().all() and out.abs().max() > 0
    assert (arguments["indices"] >= 0).all() and (arguments["indices"].diff(dim=1) > 0).all()
    moved, flops = bench.attention_cost(arguments)
    # 215,040 bytes a row with 128 + 512 keys, and the queries and results in bfloat16
    assert moved == 2 * (215_040 + 2 * 4 * 512 * 2)
    assert flops == 2 * 4 * 4 * 512 * 640


def test_the_compiled_attention_is_called_as_it_is_bound(bench, monkeypatch):
    fake = FakeModule(Path(__file__).parents[1] / "csrc" / "cuda", {})
    monkeypatch.setattr(bench, "cuda_module", lambda *_: fake)
    monkeypatch.setattr(bench, "multiprocessors", lambda: 132)
    monkeypatch.setattr(bench, "stream", lambda: 7)
    arguments = bench.attention_arguments(2, 1, 4, "cpu", visible=1024)
    bench.compiled(arguments, torch.empty_like(arguments["q"]))()
    ((name, call),) = fake.calls
    assert name == "sparse_attention" and (call["rows"], call["heads"], call["multiprocessors"]) == (2, 4, 132)
    names = ("q", "new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos", "lower", "pages", "block_table",
             "indices", "sink", "rope")  # fmt: skip
    assert all(call[name] == arguments[name].data_ptr() for name in names)


def test_index_problems_are_valid(bench):
    arguments = bench.index_arguments(2, 256, "cpu", heads=8)
    scores = mla_fp4.index_scores(**arguments)
    assert scores.shape == (2, 256) and scores.isfinite().all() and len(scores.unique()) > 100


def test_one_row_of_a_step_is_a_problem_with_the_same_result(bench):
    for requests, rows in ((3, 1), (1, 200)):  # a window in the ring, in the step's own rows, and in both
        arguments = bench.attention_arguments(requests, rows, 4, "cpu", visible=1024)
        whole = mla_fp4.sparse_attention(**{**arguments, "q": arguments["q"].float()})
        for row in {0, requests * rows // 2, requests * rows - 1}:
            alone = mla_fp4.sparse_attention(**bench.row_alone(arguments, row))
            torch.testing.assert_close(alone, whole[row : row + 1])


def test_a_window_alone_is_a_problem_without_selected_rows(load):
    bench = load("bench_window_cuda")
    arguments = bench.window_arguments(150, 4, "cpu")
    whole = mla_fp4.sparse_attention(**{**arguments, "q": arguments["q"].float()})
    alone = mla_fp4.sparse_attention(**load("bench_attention_cuda").row_alone(arguments, 149))
    torch.testing.assert_close(alone, whole[149:])


def test_keys_of_one_row_score_the_same(load, bench):
    arguments = bench.index_arguments(2, 512, "cpu", heads=8)
    part = load("bench_index_cuda").keys_between(arguments, 1, 256, 512)
    torch.testing.assert_close(mla_fp4.index_scores(**part), mla_fp4.index_scores(**arguments)[1:, 256:])


def test_points_are_those_of_the_design(load):
    entries = [e for name in ("attention", "index", "rows", "window") for e in load(f"bench_{name}_cuda").BENCHES]
    points = [case.point for entry in entries for case in entry.cases]
    assert len(points) == len(set(points)) == 27 + 9 + 8 + 3
    assert {
        "mla_decode_h8_b512", "mla_prefill_h128_q4096", "index_decode_b64_k65536", "index_decode_b1_k1048576",
        "index_topk_prefill_q8192_k65536", "topk512_r128_k65536", "rows_window_t8192", "pool_t8192",
    } <= set(points)  # fmt: skip
    assert all(entry.device == "cuda" for entry in entries) and not torch.cuda.is_initialized()


def test_peers_that_are_not_installed_are_left_out(load, monkeypatch):
    peers = load("peers")
    for name in ("flash_mla", "deep_gemm"):
        monkeypatch.setitem(sys.modules, name, None)
    indices = torch.zeros(2, 512, dtype=torch.int32)
    offers = [
        peers.flash_mla_decode(indices, 8192, 16, 128), peers.flash_mla_prefill(indices, 8192, 64),
        peers.deep_gemm_decode(2, 8192, 32), peers.deep_gemm_prefill(2, 8192, 32, 512),
    ]  # fmt: skip
    case = Case("p", {}, lambda: Problem(lambda: None, None, 0, 0, peers=offers))
    left_out = check_case(Bench("mla_fp4.nothing", [case]), case)
    assert len(left_out) == 4 and left_out[0].startswith("FlashMLA, filled to 64 heads left out: ")


def test_torch_topk_is_a_peer_anywhere(load):
    scores = torch.randn(3, 100)
    run = load("peers").torch_topk(scores, 5).make()
    assert run().indices.shape == (3, 5)
