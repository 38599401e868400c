"""The gate compares like with like and lets the machine's own speed cancel."""

import pytest

from bench.gate import regressions


def row(median, reference=1000.0, threads=2, backend="cpu"):
    peers = [] if reference is None else [{"name": "reference", "version": "torch", "median_us": reference}]
    return {"op": "toy.add", "point": "b8", "backend": backend, "median_us": median, "peers": peers,
            "versions": {"isa": "avx2", "threads": threads}, "date": "2026-01-02"}  # fmt: skip


@pytest.mark.parametrize(
    ("new", "old", "fails"),
    [
        (row(110), row(100), False),  # within 15 %
        (row(120), row(100), True),
        (row(2.9), row(1.0), False),  # under 3 us
        (row(200, reference=2000), row(100), False),  # the machine was slower, the reference too
        (row(100, reference=500), row(100), True),  # the reference got faster, the kernel did not
        (row(120, reference=None), row(100, reference=None), True),
        (row(900, threads=1), row(100), False),  # other conditions are not compared
        (row(900, backend="cpu-avx2"), row(100), False),
    ],
)
def test_gate(new, old, fails):
    assert bool(regressions([new], [old])) == fails
    assert regressions([new], []) == []


def test_the_sentence_names_op_point_and_times():
    (sentence,) = regressions([row(300)], [row(100)])
    assert "toy.add b8: 300 us, expected 100 us (3.00x slower than on 2026-01-02)" in sentence


def test_plot_writes_a_picture_or_says_why_not(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.plot import draw

    drawn = {**row(100), "fraction": 0.5}
    draw([drawn, {**row(100), "fraction": None}], "cpu", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"cpu\.jsonl"):
        draw([], "cpu", tmp_path / "b.png")
