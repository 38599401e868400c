"""Generated tables: what is printed comes from the ledger, and the documents in the repository match it."""

import pytest
from rich.console import Console

from bench import format, ledger, report, tables
from kernel_core.bench import FIELDS


def row(**changes):
    made = dict.fromkeys(FIELDS)
    made.update(
        op="toy.add", point="add_b8", shape={"n": 8}, backend="cpu", median_us=1234.0, p10_us=999.0, p90_us=2000.0,
        bound_us=617.0, fraction=0.5, peers=[{"name": "reference", "version": "torch", "median_us": 12340.0}],
        ceilings={"read_gbps": 20.0}, versions={"cpu": "A CPU", "isa": "avx2", "threads": 2, "torch": "2.13"},
        date="2026-01-02", note="",
    )  # fmt: skip
    return {**made, **changes}


def test_a_block_is_rewritten_and_the_rest_kept():
    text = "before\n<!-- ledger: toy -->\nold\n<!-- ledger: end -->\nafter <!-- ledger: other -->\n<!-- ledger: end -->"
    made = tables.regenerate(text, {"cpu": [row()]})
    assert made.startswith("before\n<!-- ledger: toy -->\n**cpu**: A CPU; instruction set avx2; threads 2; torch 2.13;")
    assert "| `add_b8` | n=8 | 1.23 ms | 1.00 - 2.00 ms | 617 us | 50.0 % | 12.3 ms | 10.0x |" in made
    assert "old" not in made and "No measurement yet." in made
    assert tables.regenerate(made, {"cpu": [row()]}) == made


def test_unknown_values_are_dashes():
    made = tables.block("all", {"cpu": [row(bound_us=None, fraction=None, peers=[])]})
    assert "| - | - | - | - |" in made


def test_notes_stand_below():
    assert "add_b8: only a note" in tables.block("toy.add", {"cpu": [row(note="only a note")]})


def test_newest_row_of_a_point_in_natural_order():
    rows = [row(point="b32"), row(point="b8", median_us=1.0), row(point="b8", median_us=2.0)]
    assert [(r["point"], r["median_us"]) for r in ledger.newest(rows)] == [("b8", 2.0), ("b32", 1234.0)]


@pytest.mark.parametrize("path", tables.documents(), ids=lambda path: "/".join(path.parts[-2:]))
def test_documents_match_the_ledger(path):
    text = path.read_text(encoding="utf-8")
    assert tables.regenerate(text, ledger.load()) == text, "run: fathom bench tables --write"


def test_numbers_for_people():
    assert [format.duration(x) for x in (None, 1.234, 45.67, 999.4, 1000, 2.5e6)] == [
        "-", "1.23 us", "45.7 us", "999 us", "1.00 ms", "2.50 s"]  # fmt: skip
    assert [format.size(x) for x in (None, 12, 1500, 2_500_000, 3_210_000_000)] == [
        "-", "12 B", "1.50 kB", "2.50 MB", "3.21 GB"]  # fmt: skip
    assert format.span(950, 1250) == "0.95 - 1.25 ms"
    assert format.percent(0.613) == "61.3 %" and format.ratio(4.2) == "4.20x"


def gpu_row(**changes):
    return row(
        **{
            "backend": "cuda", "op": "mla_fp4.sparse_attention", "point": "mla_decode_h64_b128", "note": "cuda",
            "median_us": 25.0, "p10_us": 24.0, "p90_us": 27.0, "bytes": 44_000_000, "flops": 10_737_418_240,
            "bound_us": 13.4, "fraction": 0.536,
            "peers": [{"name": "triton", "version": "", "median_us": 80.0},
                      {"name": "Slow", "version": "slow 2", "median_us": 90.0},
                      {"name": "FlashMLA", "version": "sgl-flash-mla 1.0.0", "median_us": 50.0}],
            "ceilings": {"read_gbps": None, "copy_gbps": 4300.0, "bf16_tflops": 800.0},
            "versions": {"gpu": "NVIDIA H200", "multiprocessors": 132, "torch": "2.11.0"},
            **changes,
        }
    )  # fmt: skip


def test_a_gpu_row_shows_its_rate_triton_and_the_fastest_peer():
    made = tables.block("mla_fp4", {"h200": [gpu_row()]}, "h200")
    assert made.startswith("**h200**: NVIDIA H200; multiprocessors 132; torch 2.11.0; 2026-01-02; 4300 GB/s copied")
    assert (
        "| `mla_decode_h64_b128` | 25.0 us | 24.0 - 27.0 us | 429 TFLOP/s | 13.4 us | 53.6 % | triton 80.0 us "
        "| FlashMLA | 50.0 us | 2.00x |" in made
    )
    assert "FlashMLA is sgl-flash-mla 1.0.0; Slow is slow 2." in made


def test_a_gpu_row_without_peers_names_the_other_implementation_and_who_was_left_out():
    rows = [
        gpu_row(
            point=f"rows_t{n}", peers=[], note="triton; Peer left out: Peer is not installed", flops=0, bound_us=10.2
        )
        for n in (1, 2)
    ]
    made = tables.block("mla_fp4", {"h200": rows}, "h200")
    assert "| `rows_t1` (triton) | 25.0 us | 24.0 - 27.0 us | 1760 GB/s | 10.2 us | 53.6 % | - | - | - | - |" in made
    assert made.endswith("\nrows_t1, rows_t2: Peer left out: Peer is not installed\n")


def test_a_block_of_one_device():
    text = "<!-- ledger: mla_fp4 h200 -->\nold\n<!-- ledger: end -->"
    assert "Not measured on this device yet: h200." in tables.regenerate(text, {"cpu": [gpu_row()]})
    assert "`mla_decode_h64_b128`" in tables.regenerate(text, {"cpu": [], "h200": [gpu_row()]})
    assert "h200" not in tables.block("mla_fp4", {"h200": [gpu_row()]}, "cpu").split(":")[0]


def test_the_roofline_takes_the_ledgers_ceilings_where_it_has_some():
    text = "<!-- ledger: roofline -->\n<!-- ledger: end -->"
    plain = tables.regenerate(text, {})
    assert "4284 GB/s and 798 TFLOP/s" in plain
    rows = {line.split(" | ")[0].strip("| "): line for line in plain.splitlines()}
    assert "| 13.5 us | 10.3 us | 15.1 us |" in rows["64"] and "| tensor cores | 1.12x |" in rows["64"]
    assert "| bytes |" in rows["32"] and rows["128"].endswith("| 1.00x |")
    assert "4300 GB/s and 800 TFLOP/s: the ledger's ceilings" in tables.regenerate(text, {"h200": [gpu_row()]})


def test_the_terminal_names_peers_where_there_are_some(capsys):
    console = Console(width=160)
    report.results(console, [row(), gpu_row(note="cuda; Swift left out: not installed")])
    shown = capsys.readouterr().out
    assert "reference" in shown and "12.3 ms" in shown and "reference 12.3 ms" not in shown
    assert "FlashMLA 50.0 us" in shown and "2.00x" in shown and "Swift left out: not installed" in shown
    report.line(console, gpu_row())
    assert "mla_decode_h64_b128: 25.0 us, bound 13.4 us, triton 80.0 us, Slow 90.0 us" in capsys.readouterr().out
    report.ceilings(console, gpu_row())
    assert "4300.0 GB/s copy, 800.0 TFLOP/s bf16 (NVIDIA H200)" in capsys.readouterr().out
