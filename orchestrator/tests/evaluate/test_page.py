"""Tables in a page, and the page of the shipped model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.evaluate.page import regenerate, write_page

ROOT = Path(__file__).resolve().parents[3]
PAGE, CARD = ROOT / "docs" / "mini.md", ROOT / "models" / "v41-mini" / "card.json"
FRAME = "before\n<!-- results: begin -->\nold\n<!-- results: end -->\nafter\n"
CONTENT = {
    "date": "2026-01-02T03:04:05+00:00", "size": "quick", "seconds": {"bits": 1.2}, "replay": {}, "acceptance": [],
    "calibration": None, "recall": [], "needle": [],
    "bits": [{"name": "engine", "bits_per_byte": 0.5, "stderr": 0.1, "ratio": 1.0, "ratio_stderr": 0.0, "windows": 3,
              "tokens": 30, "bytes": 90}],
}  # fmt: skip


def test_the_block_is_rewritten_and_the_rest_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(FRAME, encoding="utf-8")
    write_page(page, CONTENT)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("<!-- results: end -->\nafter\n") and "old" not in text
    assert "| engine | 0.5000 ± 0.1000 | 1.0000 ± 0.0000 | 3 | 30 |" in text
    write_page(page, CONTENT)
    assert page.read_text(encoding="utf-8") == text


def test_a_page_without_a_place_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"page\.md: got no <!-- results"):
        write_page(page, CONTENT)
    assert page.read_text(encoding="utf-8") == "nothing\n"


@pytest.mark.skipif(not CARD.is_file(), reason="this checkout has no trained model")
def test_the_page_of_the_small_model_shows_its_card():
    text = PAGE.read_text(encoding="utf-8")
    assert regenerate(text, json.loads(CARD.read_text(encoding="utf-8"))) == (text, 1)
    for plot in ("bits", "replay", "acceptance", "calibration", "recall", "needle"):
        assert (PAGE.parent / "mini" / f"{plot}.svg").stat().st_size > 1000
