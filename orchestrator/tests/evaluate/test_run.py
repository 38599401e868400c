"""A whole evaluation of the smallest model: tables, JSON, card, ledger and plots."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from orchestrator.evaluate import run
from orchestrator.evaluate.card import CARD_FILE, compare, read_card
from orchestrator.evaluate.ledger import FIELDS, append_quality, quality_rows, read_quality
from orchestrator.evaluate.report import print_results, write_json
from orchestrator.evaluate.sizes import SIZES, Sizes

TINY = Sizes(
    bits=2, replay={128: 1, 256: 2}, prompts=2, questions=2, output=8, recall={200: 1}, needle={150: 1},
    window=320, prompt_tokens=60, depths=(0.2, 0.8),
)  # fmt: skip


def evaluation(folder, model, heldout, **options):
    def make(rng, tokens, depth):
        return "x = 1\n" * (tokens // 4), "123456"

    return run.Evaluation(folder, model, heldout, "quick", needles=make, **options)


@pytest.fixture(scope="module")
def results(nano_folder, nano, heldout):
    patch = pytest.MonkeyPatch()
    patch.setitem(SIZES, "quick", TINY)
    seen = {}

    def progress(name, total):
        seen[name] = [total, 0]

        def tick(tokens):
            seen[name][1] += tokens

        return tick

    found = evaluation(nano_folder, nano, heldout, progress=progress).run()
    patch.undo()
    assert list(seen) == ["acceptance", "bits", "replay", "recall", "needle"]
    assert all(0.2 * total <= done <= 1.2 * total for total, done in seen.values()), seen
    return found


def test_every_section_has_figures(results):
    names = [f.name for f in results.figures()]
    assert len(names) == len(set(names))
    for expected in (
        "bits_engine", "bits_unquantised_ratio", "bits_decoder_replay_ratio", "replay_h128_hit_ratio",
        "replay_h256_hit_decoder_replay_ratio", "acceptance_greedy_code_length", "acceptance_t1_all_draft1",
        "calibration_ece_after", "recall_c200_l6_selected", "needle_150",
        "needle_150_every_row_read", "bits_every_row_read_ratio",
    ):  # fmt: skip
        assert expected in names
    assert set(results.seconds) == {"acceptance", "bits", "replay", "recall", "needle"}
    assert any("reference" in note for note in results.notes)


def test_tables_and_json(results, tmp_path):
    console = Console(record=True, width=160, file=open(tmp_path / "out", "w"))  # noqa: SIM115
    print_results(console, results)
    text = console.export_text()
    for title in (
        "Bits per byte",
        "prefix hit of 256",
        "Speculative",
        "calibration error",
        "Attention mass",
        "Retrieval",
    ):
        assert title in text
    write_json(tmp_path / "a" / "results.json", results)
    content = json.loads((tmp_path / "a" / "results.json").read_text())
    assert content["figures"]["bits_engine"]["value"] == results.bits[0].bits_per_byte
    assert "trials" not in content["acceptance"][0] and content["replay"]["128"][0]["name"] == "exact"


def test_a_card_is_compared_figure_by_figure(results, tmp_path):
    assert read_card(tmp_path) is None
    write_json(tmp_path / CARD_FILE, results)
    card = read_card(tmp_path)
    same = compare(card, results)
    assert len(same) == len(results.figures()) and all(c.within and c.difference == 0 for c in same)
    noise = next(c.noise for c in same if c.name == "bits_engine")
    assert noise > 0
    off = {**card, "bits_engine": {**card["bits_engine"], "value": card["bits_engine"]["value"] + 1.01 * noise}}
    changed = {c.name: c for c in compare(off, results)}
    assert not changed["bits_engine"].within and changed["bits_unquantised"].within
    (tmp_path / CARD_FILE).write_text('{"figures": [1]}')
    with pytest.raises(ValueError, match=r"card\.json"):
        read_card(tmp_path)


def test_the_ledger_keeps_the_newest_row(results, tmp_path):
    path = tmp_path / "results" / "quality.jsonl"
    rows = quality_rows(results)
    assert rows[0]["point"] == "quality_nano_bits_engine" or rows[0]["point"].startswith("quality_")
    assert all(tuple(row) == FIELDS and len(row["model"]) == 64 for row in rows)
    append_quality(path, rows)
    append_quality(path, [{**rows[0], "value": 2.5}])
    kept = read_quality(path)
    assert kept[rows[0]["point"]]["value"] == 2.5 and len(kept) == len(rows)
    with pytest.raises(ValueError, match="rows"):
        append_quality(path, [{"point": "x"}])


def test_plots_are_small_and_reproducible(results, tmp_path):
    pytest.importorskip("matplotlib")
    from orchestrator.evaluate.plots import write_plots

    paths = write_plots(tmp_path / "a", results)
    assert [p.stem for p in paths] == ["bits", "replay", "acceptance", "calibration", "recall", "needle"]
    again = write_plots(tmp_path / "b", results)
    for path, other in zip(paths, again, strict=True):
        assert path.stat().st_size < 100_000
        assert path.read_bytes() == other.read_bytes() and b"<svg" in path.read_bytes()
    assert write_plots(tmp_path / "c", replace(results, replay={}, needle=[]))[1].stem == "acceptance"


def test_sections_are_chosen_and_checked(nano_folder, nano, heldout, monkeypatch):
    monkeypatch.setitem(SIZES, "quick", TINY)
    only = evaluation(nano_folder, nano, heldout).run(["calibration"])
    assert only.calibration is not None and not only.acceptance and not only.bits
    with pytest.raises(ValueError, match="only: got 'speed'"):
        evaluation(nano_folder, nano, heldout).run(["speed"])


def test_sizes_are_cut_to_what_there_is(nano):
    cut = SIZES["default"].within(nano.config, longest=2000)
    assert cut.window == 1280 and list(cut.replay) == [256, 1024] and list(cut.recall) == [1024]
    assert list(cut.needle) == [512, 1024]  # 4096 positions leave no room for the answer behind 4096 tokens
