"""State files and compact snapshots: what comes back, what is refused, and that a failure leaves the old one."""

from __future__ import annotations

import json

import pytest
import torch

from orchestrator.train import snapshot
from orchestrator.train.snapshot import load_compact, load_state, save_compact, save_state


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.nn.Parameter(torch.randn(300, 40, generator=generator)),
        "norm.weight": torch.randn(40, generator=generator),
        "step": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "turned": torch.randn(5, 3, generator=generator).T,
    }


def test_state_round_trip(tmp_path, tensors):
    path = tmp_path / "deep" / "state.bin"
    save_state(path, tensors, {"step": 7, "loss": None})
    values, meta = load_state(path)
    assert meta == {"step": 7, "loss": None} and list(values) == list(tensors)
    for name, value in tensors.items():
        assert values[name].dtype == value.dtype and torch.equal(values[name], value), name
    assert [file.name for file in path.parent.iterdir()] == ["state.bin"]


@pytest.mark.parametrize("keep", [0, 10, 40, 300, 20000, -1])
def test_cut_state_is_named(tmp_path, tensors, keep):
    path = tmp_path / "state.bin"
    save_state(path, tensors, {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"state\.bin.*(cut short|damaged)"):
        load_state(path)


@pytest.mark.parametrize("at", [3, 20, 60, 1000, -1])
def test_damaged_state_is_named(tmp_path, tensors, at):
    path = tmp_path / "state.bin"
    save_state(path, tensors, {})
    raw = bytearray(path.read_bytes())
    raw[at] ^= 16
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"state\.bin.*(cut short|damaged)"):
        load_state(path)


def test_a_failed_save_leaves_the_old_state(tmp_path, tensors, monkeypatch):
    path = tmp_path / "state.bin"
    save_state(path, tensors, {"step": 1})
    real = snapshot._bytes
    calls = iter(range(100))

    def fails(value):
        if next(calls) > len(tensors):  # after the checksums, while writing
            raise OSError("disk full")
        return real(value)

    monkeypatch.setattr(snapshot, "_bytes", fails)
    with pytest.raises(OSError, match="disk full"):
        save_state(path, tensors, {"step": 2})
    monkeypatch.undo()
    assert load_state(path)[1] == {"step": 1} and len(list(tmp_path.iterdir())) == 1


def test_compact_round_trip(tmp_path, tensors, monkeypatch):
    monkeypatch.setattr(snapshot, "PART_BYTES", 7001)  # tensors cross the border of files, at odd bytes
    paths = save_compact(tmp_path, tensors, 12)
    assert sorted(paths) == sorted(tmp_path.iterdir()) and len(paths) == 5
    assert all(path.stat().st_size <= 7001 for path in paths)
    values, step = load_compact(tmp_path)
    assert step == 12 and list(values) == list(tensors)
    assert values["embed.weight"].dtype == torch.bfloat16
    assert torch.equal(values["embed.weight"], tensors["embed.weight"].to(torch.bfloat16))
    assert values["norm.weight"].dtype == torch.float32 and torch.equal(values["turned"], tensors["turned"])

    save_compact(tmp_path, {"norm.weight": tensors["norm.weight"]}, 13)
    assert load_compact(tmp_path)[1] == 13 and len(list(tmp_path.iterdir())) == 2  # the old parts are gone


def test_compact_refuses(tmp_path, tensors, monkeypatch):
    monkeypatch.setattr(snapshot, "PART_BYTES", 1000)
    with pytest.raises(ValueError, match=r"tensors: got 24\d+ bytes in bfloat16, allowed is 5000"):
        save_compact(tmp_path / "new", tensors, 1)
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(snapshot, "PART_BYTES", 10000)
    *parts, table = save_compact(tmp_path, tensors, 1)
    raw = parts[1].read_bytes()
    for wrong, told in ((raw[:-1], "bytes of"), (b"", "bytes of"), (raw[:-1] + bytes([raw[-1] ^ 1]), "is damaged")):
        parts[1].write_bytes(wrong)
        with pytest.raises(ValueError, match=rf"{parts[1].name}.*{told}"):
            load_compact(tmp_path)
    parts[1].unlink()
    with pytest.raises(ValueError, match=rf"{parts[1].name}: 0 bytes of"):
        load_compact(tmp_path)
    table.write_text(json.dumps({"step": 1}))
    with pytest.raises(ValueError, match=r"snapshot\.json: is damaged"):
        load_compact(tmp_path)
    table.unlink()
    with pytest.raises(ValueError, match=r"snapshot\.json: is missing"):
        load_compact(tmp_path)
