import gzip
import json
from pathlib import Path

import pytest

from bench import findings
from bench.cache import code_speed, engine, index, shards, show, trace
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_nano


def results(points: list | None = None) -> dict:
    row = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "p99.9": 4.0}
    return {
        "about": {"cpu": "some", "cores": 2, "python": "3.11", "load": 0.0, "date": "2026-01-01"},
        "trace": points,
        "operations": {"publish": 1000.0},
        "match_ms": {"hashing": 0.5},
        "code_gbps": {"one": {"encode": 1.0}},
        "tail": {"all targets alive": {"11": row}, "one target known to be dead": {"11": row}},
        "real_tail": {"11": row},
    }


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    (tmp_path / trace.AGENTIC).parent.mkdir()
    (tmp_path / trace.CHAT).parent.mkdir()
    with gzip.open(tmp_path / trace.AGENTIC, "wt") as file:
        requests = [[0.0, 1000, 9, 15, 0, 1.0, 1.0, 0], [10.0, 2000, 9, 31, 15, 1.0, 1.0, 0]]
        file.write(json.dumps({"id": "1", "block": 64, "req": requests}) + "\n")
    chat = {"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 2]}
    (tmp_path / trace.CHAT).write_text(json.dumps(chat) + "\n")
    return tmp_path


def test_curves_page_and_picture(traces: Path, tmp_path: Path) -> None:
    said: list[str] = []
    points = [point.as_dict() for point in trace.measure(traces, said.append)]
    assert len(points) == len(said) == 1 + len(trace.CAPACITIES_GB) + len(trace.TTLS_S) + len(trace.MIXED_GB) + 1
    assert points[0]["rate"] == pytest.approx(7 * 128 / 3000)
    assert points[-1]["chat"] == 0.0 and points[-1]["agent"] == pytest.approx(7 * 128 / 3000)
    text = show.page(results(points), "picture.png")
    assert (
        "![hit rate" in text and "| publish | 1,000 |" in text and "virtual clock, one target known to be dead" in text
    )
    show.draw(points, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    findings.save(tmp_path / "figures.json", results(points))
    assert show.load(tmp_path / "figures.json")["trace"] == points


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"about": 1}')
    with pytest.raises(ValueError, match="got no measurement of the cache"):
        show.load(tmp_path / "other.json")


def test_the_virtual_clock_orders_the_ways_of_asking() -> None:
    rows = shards.tail(reads=4000)
    assert rows["12"]["p99"] <= rows["11, the 12th at p95"]["p99"] < rows["10 of 10"]["p99"]
    assert rows["11, the 12th at p95"]["p99.9"] < rows["11"]["p99.9"]
    assert rows["10 of 10"]["shards asked"] == 10 and 11 < rows["11, the 12th at p95"]["shards asked"] < 11.5
    one_dead = shards.tail(reads=1000, dead=True)
    assert {row["shards asked"] for row in one_dead.values()} == {11.0}
    surprise = shards.tail(reads=1000, dead=True, known=False)
    assert "10 of 10" not in surprise and surprise["11"]["p99"] > 5 * surprise["11, the 12th at p95"]["p99"]


def test_each_part_can_be_measured() -> None:
    assert min(index.operations(1200, path=60).values()) > 0
    assert all(rate > 0 for row in code_speed.code_gbps(1).values() for rate in row.values())
    assert set(shards.real_tail(reads=3, median_ms=0.1)) == set(shards.WAYS) - {"11"}


def test_first_tokens_of_hits_of_every_kind(tmp_path: Path) -> None:
    folder = make_model(v41_nano(), tmp_path / "nano", seed=1)
    found = {one.way: one for one in engine.measure(folder, 2300)}
    cached = {way: one.cached for way, one in found.items()}
    assert cached == {
        "exact, cold": 0, "exact, windows kept": 2176, "bounded, cold": 0, "bounded, windows rebuilt": 2176,
        "canonical, cold": 0, "canonical, windows kept": 2176, "bounded, from the store": 2176,
        "canonical, from the store": 2048,
    }  # fmt: skip
    assert all(one.seconds > 0 for one in found.values())
