"""The dataset folder, built small: format, account, refusals."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.corpus import build
from orchestrator.corpus.build import build_dataset
from orchestrator.corpus.gather import gather
from orchestrator.corpus.heldout import heldout_texts
from orchestrator.corpus.wheels import Package
from orchestrator.model.engram_tables import EngramTables, compressed_vocab_size
from orchestrator.model.presets import v41_mini, v41_nano
from orchestrator.text import bundled_tokenizer

LIMIT = 60_000
FILES = ["engram.npz", "heldout.npy", "heldout_starts.npy", "meta.json", "train.npy", "train_starts.npy"]


@pytest.fixture(scope="module", params=[("v41-mini", v41_mini), ("v41-nano", v41_nano)], ids=lambda pair: pair[0])
def built(request, tmp_path_factory):
    name, config = request.param
    folder = tmp_path_factory.mktemp("corpus") / "data"
    meta = build_dataset(folder, config(), cache=folder.parent / "cache", limit_bytes=LIMIT)
    return folder, meta, config(), bundled_tokenizer(name)


def test_files_are_as_the_trainer_reads_them(built):
    folder, meta, config, tokenizer = built
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert not (folder.parent / "cache").exists() and not (folder.parent / "data.partial").exists()
    for part in ("train", "heldout"):
        tokens, starts = np.load(folder / f"{part}.npy"), np.load(folder / f"{part}_starts.npy")
        assert tokens.dtype == np.uint16 and starts.dtype == np.int64
        assert starts[0] == 0 and (np.diff(starts) > 1).all()
        assert tokens.max() < config.vocab_size
        assert (tokens[starts] == tokenizer.bos_id).all() and (tokens == tokenizer.bos_id).sum() == len(starts)
        assert (tokens[np.append(starts[1:], len(tokens)) - 1] == tokenizer.eos_ids[0]).all()
        assert meta[part]["tokens"] == len(tokens) and meta[part]["documents"] == len(starts)


def test_meta_accounts_for_everything(built):
    folder, meta, config, tokenizer = built
    assert json.loads((folder / "meta.json").read_text()) == meta
    assert meta["vocab_size"] == config.vocab_size
    assert meta["tokenizer_sha256"] == hashlib.sha256(tokenizer.text.encode()).hexdigest()
    for key in ("tokens", "bytes", "documents"):
        assert sum(source[key] for source in meta["sources"]) == meta["train"][key]
    assert sum(meta["kinds"].values()) == meta["train"]["tokens"] and min(meta["kinds"].values()) > 0
    assert 0.04 < meta["kinds"]["chat"] / meta["train"]["tokens"] < 0.1
    code = next(source for source in meta["sources"] if source["name"] == "python")
    assert code["bytes"] <= LIMIT * 1.1 and code["licence"] == "PSF-2.0"


def test_held_out_texts_decode_to_themselves(built):
    folder, meta, _, tokenizer = built
    tokens, starts = np.load(folder / "heldout.npy"), np.load(folder / "heldout_starts.npy")
    texts, names = dict(heldout_texts()), meta["heldout"]["names"]
    parts = dict(zip(names, np.split(tokens, starts[1:]), strict=True))
    plain = [name for name in names if name in texts]
    assert any(name.startswith("python/") for name in plain)
    for name in plain:
        assert tokenizer.decode(parts[name].tolist()) == texts[name]
    assert {name.split("/")[0] for name in names} == {"python", "topic", "chat", "retrieval"}


def test_nothing_held_out_is_trained_on(built):
    folder, _, _, _ = built
    parts = []
    for name in ("train", "heldout"):
        tokens, starts = np.load(folder / f"{name}.npy"), np.load(folder / f"{name}_starts.npy")
        parts.append({document.tobytes() for document in np.split(tokens, starts[1:])})
    train, held = parts
    assert not train & held


def test_engram_constants_are_those_of_the_engine(built):
    folder, _, config, tokenizer = built
    path = folder.parent / "tokenizer.json"
    path.write_text(tokenizer.text)
    size = compressed_vocab_size(path, config.vocab_size)
    tables = EngramTables.build(replace(config, engram_compressed_vocab_size=size), path)
    stored = np.load(folder / "engram.npz")
    assert (stored["token_map"] == tables.token_map.numpy()).all() and stored["mapped_pad"] == tables.mapped_pad
    for layer, made in tables.layers.items():
        for name in ("multipliers", "primes", "offsets"):
            array = stored[f"{name}.{layer}"]
            assert array.dtype == np.int64 and (array == getattr(made, name).numpy()).all()
    assert len(stored.files) == 2 + 3 * len(config.engram_layer_ids)


def test_building_again_gives_the_same_bytes(built, tmp_path):
    folder, _, config, _ = built
    build_dataset(tmp_path / "again", config, cache=tmp_path, limit_bytes=LIMIT)
    for name in FILES:
        if not name.endswith("npz"):  # an archive holds the time
            assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    build_dataset(tmp_path / "other", config, cache=tmp_path, limit_bytes=LIMIT, seed=1)
    assert (folder / "train.npy").read_bytes() != (tmp_path / "other" / "train.npy").read_bytes()


def test_bad_input_writes_nothing(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("mine")
    with pytest.raises(ValueError, match=r"^folder: got .*full, which is not empty"):
        build_dataset(full, v41_nano(), cache=tmp_path, limit_bytes=LIMIT)
    with pytest.raises(ValueError, match=r"^limit_bytes: got 5"):
        build_dataset(tmp_path / "a", v41_nano(), cache=tmp_path, limit_bytes=5)
    with pytest.raises(ValueError, match=r"^config.vocab_size: got 1000"):
        build_dataset(tmp_path / "a", replace(v41_nano(), vocab_size=1000), cache=tmp_path, limit_bytes=LIMIT)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_failing_package_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("pip download thing==1: no")

    monkeypatch.setattr(build, "gather", fail)
    with pytest.raises(RuntimeError, match="thing==1"):
        build_dataset(tmp_path / "a", v41_nano(), cache=tmp_path, packages=[Package("thing", "1", "MIT")])
    assert list(tmp_path.iterdir()) == []


def test_documentation_is_left_out_with_a_note_where_it_cannot_be_had(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("orchestrator.corpus.gather.STDLIB_LIMIT", LIMIT)
    gathered = gather(tmp_path, [])
    assert gathered.notes and "documentation" in gathered.notes[0]
    assert {source.name for source in gathered.sources} == {"python", "python topics"}
