"""The runner over a package made for the test: discovery, selection, rows, states, exit codes."""

import json
import sys

import pytest

from bench import discover, ledger, main
from bench.discover import select
from bench.status import states

BENCH = """
from kernel_core.bench import Bench, Case, Problem

def make(n):
    return Problem(native=lambda: sum(range(n)), reference=lambda: sum(range(2 * n)), bytes=8 * n, flops=n)

BENCHES = [Bench("toy.add", [Case(f"add_b{n}", {"n": n}, lambda n=n: make(n)) for n in (8, 32, 128)])]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with one good package, the runner pointed at it."""
    folder = tmp_path / "packages" / "toy"
    (folder / "bench").mkdir(parents=True)
    (folder / "csrc").mkdir()
    (folder / "csrc" / "toy.cpp").write_text("int toy;")
    (folder / "bench" / "bench_add.py").write_text(BENCH)
    monkeypatch.setattr(main, "discover", lambda: discover.discover(tmp_path))
    monkeypatch.setattr(main, "ceilings", lambda: main_ceilings())
    return tmp_path


def main_ceilings():
    from kernel_core.bench import Ceilings

    return Ceilings(read_gbps=10.0, f32_tflops=1.0)


def test_discovery_and_selection(project):
    found = discover.discover(project)
    assert [entry.bench.op for entry in found.entries] == ["toy.add"] and not found.errors
    for names, count in (([], 3), (["toy"], 3), (["toy.add"], 3), (["add"], 3), (["add_b8"], 1), (["add_b*8"], 2)):
        assert len(select(found, names)) == count, names
    with pytest.raises(ValueError, match=r"'add_b9'.*toy\.add"):
        select(found, ["add_b8", "add_b9"])


def test_a_broken_file_is_named_and_hides_no_other(project, capsys):
    (project / "packages" / "toy" / "bench" / "bench_bad.py").write_text("import nothing_of_this_name")
    (project / "packages" / "toy" / "bench" / "bench_odd.py").write_text("BENCHES = 3")
    found = discover.discover(project)
    assert len(found.entries) == 1 and len(found.errors) == 2
    assert main.run(["list"]) == 1
    shown = capsys.readouterr().out
    assert "bench_bad.py" in shown and "nothing_of_this_name" in shown and "add_b32" in shown


def test_run_writes_rows_and_status_notices_changes(project, tmp_path, capsys):
    out = tmp_path / "results" / "cpu.jsonl"
    assert main.run(["add_b*", "--budget", "0.01", "--out", str(out)]) == 0
    assert [json.loads(line)["point"] for line in out.read_text().splitlines()] == ["add_b8", "add_b32", "add_b128"]
    assert main.run(["status", "--check", "--results", str(out.parent)]) == 0
    assert "3 of 3 points are current" in capsys.readouterr().out

    (project / "packages" / "toy" / "csrc" / "toy.cpp").write_text("long toy;")
    assert main.run(["status", "--results", str(out.parent)]) == 0
    assert main.run(["status", "--check", "--results", str(out.parent)]) == 1
    shown = capsys.readouterr().out
    assert "stale" in shown and "add_b32" in shown and "0 of 3" in shown

    assert main.run(["add_b8", "--budget", "0.01", "--out", str(out)]) == 0
    rows = ledger.load(out.parent)["cpu"]
    assert [row["point"] for row in rows] == ["add_b8", "add_b32", "add_b128"]
    known = {state.point: state.state for state in states(discover.discover(project), rows)}
    assert known == {"add_b8": "current", "add_b32": "stale", "add_b128": "stale"}


def test_states_of_rows_without_bench_and_benches_without_row(project):
    found = discover.discover(project)
    row = {"op": "toy.gone", "point": "x", "backend": "cpu", "digest": "0", "date": "2026-01-01"}
    known = {(s.op, s.point): s.state for s in states(found, [row])}
    assert known[("toy.gone", "x")] == "orphan" and known[("toy.add", "add_b8")] == "missing"
    assert len(states(found, [row], missing=False)) == 1


def test_dry_run_writes_nothing(project, tmp_path):
    out = tmp_path / "r.jsonl"
    assert main.run(["toy", "--budget", "0", "--dry-run", "--out", str(out), "--isa", "scalar", "--threads", "1"]) == 0
    assert not out.exists()


def test_a_failing_case_is_reported_and_the_others_run(project, tmp_path, capsys):
    text = BENCH.replace("def make(n):", "def make(n):\n    assert n != 32, 'wrong result'")
    (project / "packages" / "toy" / "bench" / "bench_add.py").write_text(text)
    out = tmp_path / "r.jsonl"
    assert main.run(["toy", "--budget", "0", "--out", str(out)]) == 1
    assert "add_b32 failed: AssertionError: wrong result" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2


def test_points_narrow_the_choice(project):
    found = discover.discover(project)
    assert [case.point for _, case in select(found, ["toy"], ["*_b8", "*_b32"])] == ["add_b8", "add_b32"]
    with pytest.raises(ValueError, match=r"points: got '\*_b9'"):
        select(found, ["toy"], ["*_b9"])


def test_modules_beside_a_bench_are_found_and_stay_in_their_folder(project):
    for name, value in (("toy", 8), ("other", 32)):
        folder = project / "packages" / name / "bench"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "shared.py").write_text(f"POINT = 'p{value}'")
        (folder / "bench_shared.py").write_text(
            "import shared\nfrom kernel_core.bench import Bench, Case\n"
            f"BENCHES = [Bench('{name}.op', [Case(shared.POINT, {{}}, lambda: None)])]"
        )
    found = discover.discover(project)
    assert not found.errors and "shared" not in sys.modules
    assert {case.point for _, case in found.cases()} >= {"p8", "p32"}


def test_check_runs_once_and_writes_nothing(project, tmp_path, capsys):
    out = tmp_path / "r.jsonl"
    assert main.run(["toy", "--check", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "add_b8 ok" in shown and "3 cases checked on the cpu device" in shown and not out.exists()
    text = BENCH.replace("def make(n):", "def make(n):\n    assert n != 32, 'wrong result'")
    (project / "packages" / "toy" / "bench" / "bench_add.py").write_text(text)
    assert main.run(["toy", "--check"]) == 1
    shown = capsys.readouterr().out
    assert "add_b32 failed: AssertionError: wrong result" in shown and "add_b128 ok" in shown


def test_a_lost_device_ends_the_run_after_what_was_measured(project, tmp_path, monkeypatch, capsys):
    text = BENCH.replace("(8, 32, 128)])", "(8, 32, 128)], device='cuda')")
    text = text.replace("def make(n):", "def make(n):\n    assert n != 32, 'illegal access'")
    (project / "packages" / "toy" / "bench" / "bench_add.py").write_text(text)

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(main.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(main.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(main, "cuda_ceilings", main_ceilings)
    monkeypatch.setattr("kernel_core.bench.measure._finish", lambda bench: None)
    monkeypatch.setattr("kernel_core.bench.measure.interleave_cuda", lambda runs, **_: timed(runs))
    monkeypatch.setattr("kernel_core.bench.measure.cuda_versions", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(main.ledger, "RESULTS", tmp_path)
    monkeypatch.setattr(main.torch.cuda, "synchronize", lost)
    assert main.run(["toy", "--device", "cuda"]) == 1
    shown = capsys.readouterr().out
    assert "illegal access" in shown and "the device is lost" in shown
    assert [row["point"] for row in ledger.load(tmp_path)["h200"]] == ["add_b8"]
    monkeypatch.setattr(main.torch.cuda, "synchronize", lambda: None)
    assert main.run(["toy", "--device", "cuda"]) == 1
    assert [row["point"] for row in ledger.load(tmp_path)["h200"]] == ["add_b8", "add_b128"]


def timed(runs):
    from kernel_core.bench import Timing

    return {name: Timing(2.0, 1.0, 3.0, 5) for name in runs}


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ([], 0, "Examples"),
        (["--help"], 0, "fathom bench list"),
        (["run"], 2, "--all"),
        (["no_such_op"], 2, "no_such_op"),
        (["toy", "--isa", "sse9"], 2, "sse9"),
        (["toy", "--threads", "0"], 2, "threads"),
    ],
)
def test_help_and_mistakes(project, capsys, argv, status, words):
    assert main.run(argv) == status
    assert words in capsys.readouterr().out


def test_options_alone_mean_run(capsys):
    assert main.run(["--all", "--device", "nowhere"]) == 2
    assert "--device" in capsys.readouterr().out
    assert main.run(["--help"]) == 0
