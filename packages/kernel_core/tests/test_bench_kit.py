"""The benchmark kit: bounds worked out by hand, rows with the fields of the ledger, digests that notice a change."""

import json
import time
from dataclasses import replace

import pytest
import torch

from kernel_core import bench as kit

RATES = kit.Ceilings(read_gbps=100.0, copy_gbps=80.0, f32_tflops=2.0)
TIMING = kit.Timing(20.0, 18.0, 30.0, 7)


def row(**changes):
    given = dict(point="p", op="pkg.op", shape={"rows": 2}, backend="cpu", timing=TIMING, bytes=1_000_000, flops=0,
                 ceilings=RATES, digest="0" * 16)  # fmt: skip
    return kit.ledger_row(**{**given, **changes})


def test_bound_is_the_larger_of_bytes_and_operations():
    assert kit.bound_us(1_000_000, 0, RATES) == pytest.approx(10.0)  # 1 MB at 100 GB/s
    assert kit.bound_us(1_000_000, 60_000_000, RATES) == pytest.approx(30.0)  # 60 MFLOP at 2 TFLOP/s
    assert kit.bound_us(0, 0, RATES) == 0


def test_a_missing_ceiling_gives_no_bound():
    assert kit.bound_us(1, 0, kit.Ceilings()) is None
    assert kit.bound_us(1, 1, replace(RATES, f32_tflops=None)) is None
    assert kit.bound_us(1, 1, RATES, compute="bf16") is None
    assert kit.bound_us(1, 0, RATES, compute="bf16") is not None
    assert kit.bound_us(1, 0, RATES, path="h2d") is None


def test_bytes_of_the_link_have_their_own_ceiling():
    rates = replace(RATES, h2d_gbps=50.0)
    assert kit.bound_us(1_000_000, 0, rates, path="h2d") == pytest.approx(20.0)
    assert kit.bound_us(1_000_000, 0, rates) == pytest.approx(10.0)
    with pytest.raises(ValueError, match="path: got 'link'"):
        kit.Problem(lambda: None, None, 0, 0, path="link")


def test_row_has_the_fields_of_the_ledger():
    made = row()
    assert tuple(made) == kit.FIELDS
    assert made["bound_us"] == 10.0 and made["fraction"] == 0.5
    assert json.loads(json.dumps(made)) == made
    unknown = row(bytes=None, digest=None, ceilings=kit.Ceilings())
    assert unknown["bound_us"] is unknown["fraction"] is unknown["digest"] is None


def test_ledger_file_round_trip(tmp_path):
    path = tmp_path / "results" / "cpu.jsonl"
    assert list(kit.read_rows(path)) == []
    kit.append_row(path, row())
    kit.append_row(path, row(point="q"))
    assert [r["point"] for r in kit.read_rows(path)] == ["p", "q"]
    with pytest.raises(ValueError, match="extra"):
        kit.append_row(path, {**row(), "extra": 1})
    path.write_text("{}\nnot json\n")
    with pytest.raises(ValueError, match="line 2"):
        list(kit.read_rows(path))


def test_timing_quantiles():
    timing = kit.Timing.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median_us, timing.p10_us, timing.p90_us, timing.runs) == (3.0, 1.4, 4.6, 5)
    assert kit.Timing.of([2.0]) == kit.Timing(2.0, 2.0, 2.0, 1)


def test_interleave_takes_turns():
    calls = []
    slow = dict(a=lambda: (calls.append("a"), time.sleep(3e-4)), b=lambda: (calls.append("b"), time.sleep(3e-4)))
    times = kit.interleave(slow, budget_s=0, min_runs=3)
    assert times["a"].runs == times["b"].runs == 3
    assert calls[-6:] == ["a", "b"] * 3
    assert times["a"].median_us > 250


def test_before_runs_ahead_of_every_call():
    calls = []
    kit.interleave({"x": lambda: calls.append("x")}, budget_s=0, min_runs=2, before=lambda: calls.append("evict"))
    assert calls[-4:] == ["evict", "x", "evict", "x"]


def test_ceilings_are_measured_or_none():
    rates = kit.ceilings(megabytes=8, repeats=1)
    assert rates.read_gbps > 0.1 and rates.copy_gbps > 0.1 and rates.f32_tflops > 1e-4
    assert rates.fp8_tflops is None and rates.h2d_gbps is None


def test_digest_follows_contents_and_names_only(tmp_path):
    def digest(root):
        return kit.source_digest(root, ("csrc/**/*", "src/**/*.py"))

    for name in ("a", "b"):
        (tmp_path / name / "csrc" / "cpu").mkdir(parents=True)
        (tmp_path / name / "csrc" / "cpu" / "x.cpp").write_text("int x;")
        (tmp_path / name / "README.md").write_text(name)
    first = digest(tmp_path / "a")
    assert first == digest(tmp_path / "b") and len(first) == 16
    (tmp_path / "a" / "csrc" / "built.so").write_text("binary")
    assert digest(tmp_path / "a") == first
    (tmp_path / "a" / "csrc" / "cpu" / "x.cpp").write_text("int y;")
    assert digest(tmp_path / "a") != first
    (tmp_path / "b" / "csrc" / "cpu" / "x.cpp").rename(tmp_path / "b" / "csrc" / "cpu" / "z.cpp")
    assert digest(tmp_path / "b") != first


def test_a_digest_is_of_one_device(tmp_path):
    for place in ("cpu", "cuda/sm90"):
        (tmp_path / "csrc" / place).mkdir(parents=True)
        (tmp_path / "csrc" / place / "x.cpp").write_text("int x;")
    both = [kit.source_digest(tmp_path, ("csrc/**/*",), device) for device in ("cpu", "cuda")]
    (tmp_path / "csrc" / "cuda" / "sm90" / "x.cpp").write_text("int y;")
    (tmp_path / "csrc" / "triton_x.py").write_text("y = 1")
    after = [kit.source_digest(tmp_path, ("csrc/**/*",), device) for device in ("cpu", "cuda")]
    assert after[0] == both[0] and after[1] != both[1]


def test_run_case_times_native_and_reference(tmp_path):
    x = torch.randn(64)
    order = []
    problem = kit.Problem(
        native=lambda: order.append("native"),
        reference=lambda: order.append("reference"),
        bytes=512,
        flops=64,
        peers=(kit.Peer("other", "1.2", lambda: x + x),),
        check=lambda: order.append("check"),
        note="a note",
    )
    bench = kit.Bench("pkg.op", [kit.Case("point_64", {"n": 64}, lambda: problem)])
    made = kit.run_case(bench, bench.cases[0], package=tmp_path, ceilings=RATES, budget_s=0.01)
    assert order[:2] == ["native", "check"]
    assert made["point"] == "point_64" and made["note"] == "a note" and made["bytes"] == 512
    assert [(p["name"], p["version"]) for p in made["peers"]] == [
        ("reference", f"torch {torch.__version__}"),
        ("other", "1.2"),
    ]
    assert made["versions"]["threads"] == torch.get_num_threads()


def test_a_wrong_result_is_not_timed(tmp_path):
    def wrong():
        raise AssertionError("differs")

    problem = kit.Problem(native=lambda: None, reference=None, bytes=1, flops=0, check=wrong)
    bench = kit.Bench("pkg.op", [kit.Case("p", {}, lambda: problem)])
    with pytest.raises(AssertionError, match="differs"):
        kit.run_case(bench, bench.cases[0], package=tmp_path, ceilings=RATES)


def test_problem_refuses_an_unknown_ceiling():
    with pytest.raises(ValueError, match="compute: got 'int8'"):
        kit.Problem(native=lambda: None, reference=None, bytes=1, flops=0, compute="int8")


def test_an_offer_that_fails_is_left_out_with_its_reason(tmp_path):
    def missing():
        raise ModuleNotFoundError("No module named 'swift'", name="swift")

    def refuses():
        raise RuntimeError("heads must be 64\nand more")

    offers = [
        kit.Offer("swift", missing), kit.Offer("picky", lambda: refuses),
        kit.Offer("good", lambda: lambda: None, "torch"),
    ]  # fmt: skip
    case = kit.Case("p", {}, lambda: kit.Problem(lambda: None, None, bytes=8, flops=0, peers=offers, note="cuda"))
    bench = kit.Bench("pkg.op", [case])
    made = kit.run_case(bench, case, package=tmp_path, ceilings=RATES, budget_s=0.01)
    assert [peer["name"] for peer in made["peers"]] == ["good"]
    assert made["peers"][0]["version"] == f"torch {torch.__version__}"
    left_out = ["swift left out: swift is not installed", "picky left out: RuntimeError heads must be 64"]
    assert made["note"] == "; ".join(["cuda", *left_out]) and kit.check_case(bench, case) == left_out


def test_a_check_runs_everything_once_and_times_nothing():
    calls = []
    problem = kit.Problem(lambda: calls.append("native"), lambda: calls.append("reference"), 0, 0)
    case = kit.Case("p", {}, lambda: problem)
    assert kit.check_case(kit.Bench("pkg.op", [case]), case) == []
    assert calls == ["native", "native", "reference"]


def test_helpers_of_gpu_benches():
    from kernel_core.bench import device

    assert device.cuda_module("kernel_core.no_such_module", "f") is None
    assert device.cuda_module("math", "no_such_function") is None and device.cuda_module("math", "sin") is not None
    assert device.address(None) == 0 and device.address(torch.ones(1)) != 0
    device.assert_near("x", torch.ones(4), torch.ones(4) * 1.001, 2e-3)
    for wrong in (torch.full((4,), 1.1), torch.full((4,), torch.nan)):
        with pytest.raises(ArithmeticError, match="x: relative error"):
            device.assert_near("x", wrong, torch.ones(4), 2e-3)
