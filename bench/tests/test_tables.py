"""Generated tables: what is printed comes from the ledger, and the documents in the repository match it."""

import pytest

from bench import format, ledger, tables
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
