"""What a model folder says about sampling."""

from __future__ import annotations

import pytest

from orchestrator.text.sampling import FILE, sampling_defaults, write_sampling_defaults


def test_without_a_file_nothing_is_changed(tmp_path):
    assert sampling_defaults(tmp_path) == {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def test_round_trip(tmp_path):
    write_sampling_defaults(tmp_path, temperature=0.5, top_p=0.9)
    assert sampling_defaults(tmp_path) == {"temperature": 0.5, "top_p": 0.9, "top_k": 0}


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": "warm"}', '{"top_p": true}'])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=FILE):
        sampling_defaults(tmp_path)
