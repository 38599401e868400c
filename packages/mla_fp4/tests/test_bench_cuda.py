"""The GPU benches' problems, built small on the CPU: valid for the ops, with the bytes and operations they state."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mla_fp4


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "bench_attention_cuda.py"
    spec = importlib.util.spec_from_file_location("bench_attention_cuda", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_attention_problems_are_valid(bench):
    arguments = bench.attention_arguments(2, 1, 4, "cpu", visible=1024)
    out = mla_fp4.sparse_attention(**{**arguments, "q": arguments["q"].float()})
    assert out.isfinite().all() and out.abs().max() > 0
    assert (arguments["indices"] >= 0).all() and (arguments["indices"].diff(dim=1) > 0).all()
    moved, flops = bench.attention_cost(arguments)
    # 215,040 bytes a row with 128 + 512 keys, and the queries and results in bfloat16
    assert moved == 2 * (215_040 + 2 * 4 * 512 * 2)
    assert flops == 2 * 4 * 4 * 512 * 640


def test_index_problems_are_valid(bench):
    arguments = bench.index_arguments(2, 256, "cpu", heads=8)
    scores = mla_fp4.index_scores(**arguments)
    assert scores.shape == (2, 256) and scores.isfinite().all() and len(scores.unique()) > 100


def test_points_are_those_of_the_design(bench):
    points = [case.point for entry in bench.BENCHES for case in entry.cases]
    assert len(points) == len(set(points)) == 22
    assert {"mla_decode_h64_b128", "mla_prefill_h64_q4096", "index_decode_b64_k65536"} <= set(points)
    assert all(entry.device == "cuda" for entry in bench.BENCHES) and not torch.cuda.is_initialized()
