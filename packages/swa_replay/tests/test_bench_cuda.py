"""The GPU benches' problems, built small on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

import swa_replay


def test_the_first_rows_of_a_step_are_a_problem_with_the_same_result():
    path = Path(__file__).parents[1] / "bench" / "bench_window_cuda.py"
    spec = importlib.util.spec_from_file_location("bench_window_cuda", path)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    arguments = bench.window_arguments(2, 20, 4, "cpu")
    whole = swa_replay.window_attention(**{**arguments, "q": arguments["q"].float()})
    torch.testing.assert_close(swa_replay.window_attention(**bench.first_rows(arguments, 7)), whole[:7])
    assert all(entry.device == "cuda" for entry in bench.BENCHES)
