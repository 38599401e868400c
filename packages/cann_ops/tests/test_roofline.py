"""Bounds by arithmetic: counted by hand for a small shape, and the table of the document is this table."""

from __future__ import annotations

from pathlib import Path

import pytest

from cann_ops import roofline

PAGE = Path(__file__).parents[3] / "docs" / "kernels" / "cann_ops.md"


def test_attention_counts_rows_lists_q_and_result():
    work = roofline.attention(2, 64, 128, 512)
    assert work.read == 2 * (128 * 528 + 512 * 288 + 640 * 4 + 64 * 512 * 2)
    assert work.written == 2 * 64 * 512 * 2
    assert work.macs == 2 * 64 * 640 * 512 * 2


def test_times_are_bytes_and_products_over_the_rates():
    work = roofline.Work("op", "", 1_600_000, 1_600_000, 4096 * 32 * 1650, "bf16")
    assert work.memory_us("950PR") == pytest.approx(2.0) and work.memory_us("950DT") == pytest.approx(0.8)
    assert work.cube_us() == pytest.approx(1.0)


def test_the_document_has_the_table():
    if not PAGE.is_file():
        pytest.skip("needs the checkout")
    assert roofline.markdown() in PAGE.read_text(encoding="utf-8")
