"""Files that are missing, cut, or placed otherwise than the index says."""

from __future__ import annotations

import json
import shutil

import pytest

from orchestrator.model.checkpoint import Checkpoint, CheckpointError, load_weights
from orchestrator.model.checkpoint.writer import write_checkpoint
from orchestrator.model.init import RandomWeights
from orchestrator.model.presets import v41_nano


@pytest.fixture(scope="module")
def sharded_source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    config = v41_nano(stages=0)
    write_checkpoint(folder, config, RandomWeights(config), placement=lambda name: "norm" not in name)
    return folder


@pytest.fixture
def sharded(sharded_source, tmp_path):
    """A checkpoint of two shards, the first with the norms, to be damaged."""
    return shutil.copytree(sharded_source, tmp_path / "sharded")


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_shards_are_read(sharded):
    load_weights(sharded)
    assert Checkpoint(sharded).file_of("norm.weight").name == FIRST


INDEX_CASES = {
    "placed elsewhere": (
        lambda i: i["weight_map"].update({"norm.weight": SECOND}),
        rf"{FIRST}: holds norm\.weight, but {INDEX} places it in {SECOND}; keep one copy|"
        rf"{SECOND}: lacks norm\.weight, which {INDEX} places there",
    ),
    "not named": (
        lambda i: i["weight_map"].pop("norm.weight"),
        rf"{FIRST}: holds norm\.weight, but {INDEX} does not name it; keep one copy",
    ),
    "not there": (
        lambda i: i["weight_map"].update({"extra": FIRST}),
        rf"{FIRST}: lacks extra, which {INDEX} places there; download both from one revision",
    ),
    "no such shard": (
        lambda i: i["weight_map"].update({"norm.weight": "model-9.safetensors"}),
        r"model-9\.safetensors: no such file; copy it or download it again",
    ),
    "outside": (
        lambda i: i["weight_map"].update({"norm.weight": "../x.safetensors"}),
        r"places norm\.weight in '\.\./x\.safetensors', allowed is a \.safetensors file of this folder",
    ),
    "total": (
        lambda i: i["metadata"].update(total_size=1),
        rf"{INDEX}: total_size 1, but the shards hold \d+ bytes; rebuild the index",
    ),
    "no map": (lambda i: i.pop("weight_map"), rf"{INDEX}: has no weight_map; rebuild the index"),
}


@pytest.mark.parametrize("case", INDEX_CASES)
def test_wrong_index(sharded, case):
    edit, message = INDEX_CASES[case]
    edit_index(sharded, edit)
    with pytest.raises(CheckpointError, match=message):
        load_weights(sharded)


def test_index_without_total_is_accepted(sharded):
    edit_index(sharded, lambda i: i.pop("metadata"))
    load_weights(sharded)


def test_duplicate_in_shards(sharded):
    """A tensor in two shards, whatever the index says."""
    copy_tensor(sharded / FIRST, sharded / SECOND, "norm.weight")
    with pytest.raises(CheckpointError, match=rf"{SECOND}: holds norm\.weight, but {INDEX} places it in {FIRST}"):
        load_weights(sharded)


def copy_tensor(source, target, name):
    """Copy a tensor from one file into another."""

    def split(path):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        return json.loads(raw[8 : 8 + length]), raw[8 + length :]

    (header, payload), (entry, data) = split(target), (lambda h, p: (h[name], p))(*split(source))
    begin, end = entry["data_offsets"]
    header[name] = {**entry, "data_offsets": [len(payload), len(payload) + end - begin]}
    text = json.dumps(header).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + payload + data[begin:end])


def test_truncated_shard(sharded):
    data = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(data[:-1000])
    with pytest.raises(CheckpointError, match=rf"{SECOND}: .* the file is truncated, copy it again"):
        load_weights(sharded)


def test_missing_shard(sharded):
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=rf"{SECOND}: no such file; copy it or download it again"):
        load_weights(sharded)


def test_shards_without_index(sharded):
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match=rf"holds 2 files \({FIRST}, {SECOND} \.\.\.\) but no {INDEX}; add"):
        load_weights(sharded)


def test_damaged_json(sharded):
    (sharded / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match=rf"{INDEX}: no JSON .*; download it again"):
        load_weights(sharded)
    (sharded / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config\.json: no JSON .*; download it again"):
        load_weights(sharded)


def test_nothing_there(tmp_path, nano_folder):
    with pytest.raises(CheckpointError, match=r"absent: no such folder; give a folder with config\.json"):
        load_weights(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file; download it with the weights"):
        load_weights(tmp_path)
    shutil.copy(nano_folder / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=rf"holds neither model\.safetensors nor {INDEX}; download the weights"):
        load_weights(tmp_path)
