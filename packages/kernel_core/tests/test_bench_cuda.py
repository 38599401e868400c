"""The order of a GPU sample, with a clock that keeps a diary; and the arithmetic around it."""

from __future__ import annotations

import pytest
import torch

from kernel_core.bench import Bench, Case, Ceilings, Problem, bound_us, device_ledger, interleave_cuda


class Diary:
    """A device whose time moves by what a callable says it takes."""

    def __init__(self):
        self.lines, self.now = [], 0.0

    def flush(self):
        self.lines.append("flush")
        self.now += 1000

    def spin(self):
        self.lines.append("spin")
        self.now += 500

    def mark(self):
        self.lines.append("mark")
        return self.now

    def synchronize(self):
        self.lines.append("synchronize")

    def microseconds(self, start, stop):
        return stop - start

    def call(self, name, us):
        def run():
            self.lines.append(name)
            self.now += us

        return run


def test_a_sample_encloses_the_call_alone():
    clock = Diary()
    times = interleave_cuda(
        {"a": clock.call("a", 7.0), "b": clock.call("b", 11.0)}, budget_s=0, min_runs=2, max_runs=2, clock=clock
    )
    warm_up = ["a"] * 3 + ["b"] * 3 + ["synchronize"]
    turn = ["flush", "spin", "mark", "a", "mark", "flush", "spin", "mark", "b", "mark", "synchronize"]
    assert clock.lines == warm_up + 2 * turn
    assert times["a"].median_us == 7.0 and times["b"].median_us == 11.0 and times["a"].runs == 2


def test_warm_calls_are_not_flushed():
    clock = Diary()
    interleave_cuda({"a": clock.call("a", 1.0)}, budget_s=0, min_runs=1, max_runs=1, cold=False, clock=clock)
    assert "flush" not in clock.lines and "spin" in clock.lines


def test_an_error_reaches_the_caller():
    def broken():
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        interleave_cuda({"a": broken}, clock=Diary())


@pytest.mark.parametrize(
    ("name", "stem"),
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx_4090"), ("NVIDIA B200", "b200"), ("", "gpu")],
)
def test_the_ledger_is_named_for_the_device(name, stem):
    assert device_ledger(name) == stem


def test_bounds_of_a_gpu():
    rates = Ceilings(copy_gbps=4000, bf16_tflops=800, fp8_tflops=1600)
    assert bound_us(4_000_000, 0, rates) == pytest.approx(1.0)
    assert bound_us(0, 1_600_000_000, rates, "bf16") == pytest.approx(2.0)
    assert bound_us(0, 1_600_000_000, rates, "fp8") == pytest.approx(1.0)
    assert bound_us(0, 1, rates, "f32") is None


def test_devices_and_units_are_checked():
    with pytest.raises(ValueError, match="device: got 'tpu'"):
        Bench("x.y", [], device="tpu")
    with pytest.raises(ValueError, match="compute: got 'int8'"):
        Problem(native=lambda: None, reference=None, bytes=0, flops=0, compute="int8")
    assert Bench("x.y", [Case("p", {}, lambda: None)]).device == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_copy_is_timed_near_its_bandwidth():
    from kernel_core.bench import cuda_ceilings

    rates = cuda_ceilings()
    x = torch.randn(1 << 27, device="cuda")
    y = torch.empty_like(x)
    us = interleave_cuda({"copy": lambda: y.copy_(x)}, budget_s=0.5)["copy"].median_us
    assert rates.copy_gbps is not None and 0.7 < 8 * x.numel() / us / 1e3 / rates.copy_gbps < 1.2
