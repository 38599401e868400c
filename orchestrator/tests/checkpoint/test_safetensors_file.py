"""One safetensors file: what is read, and what a damaged header gives."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.model.checkpoint.safetensors_file import SafetensorsFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def write(path, header, payload=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + payload)


def entry(dtype="F32", shape=(1,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def test_reads_what_the_library_writes(path):
    tensors = {
        "a": torch.randn(5, 7),
        "b": torch.randn(3, 4).bfloat16(),
        "c": torch.randn(4, 32).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert set(file.entries) == set(tensors)
    for name, expected in tensors.items():
        for actual in (file.read(name), file.map(name)):
            assert actual.dtype == expected.dtype and actual.shape == expected.shape
            assert actual.flatten().view(torch.uint8).tolist() == expected.flatten().view(torch.uint8).tolist()
    assert torch.equal(file.read_rows("a", 2, 4), tensors["a"][2:4])
    assert file.read_rows("a", 5, 5).shape == (0, 7)
    out = torch.full((3, 4), math.nan, dtype=torch.bfloat16)
    file.read_into("b", out)
    assert torch.equal(out, tensors["b"])


def test_bits_of_scales_and_codes_are_kept(path):
    write(
        path,
        {"s": entry("F8_E8M0", (1, 4), (0, 4)), "w": entry("I8", (2, 2), (4, 8))},
        bytes([0, 115, 255, 128, 0xA0, 255, 0x4A, 1]),
    )
    file = SafetensorsFile(path)
    assert file.read("s").dtype == torch.uint8 and file.read("s").tolist() == [[0, 115, 255, 128]]
    assert file.read("w").tolist() == [[0xA0, 255], [0x4A, 1]]


def test_misuse(path):
    write(path, {"a": entry("F32", (2, 1), (0, 8)), "h": entry("F16", (1,), (8, 10))}, b"\0" * 10)
    file = SafetensorsFile(path)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: has no tensor b"):
        file.read("b")
    with pytest.raises(CheckpointError, match=r"h: got dtype F16, allowed is F32, BF16"):
        file.read("h")
    with pytest.raises(ValueError, match=r"rows: got 1:3, allowed is 0 <= start <= stop <= 2 for a"):
        file.read_rows("a", 1, 3)
    with pytest.raises(ValueError, match=r"out: got shape \[3\], allowed is \[2, 1\] \(a\)"):
        file.read_into("a", torch.zeros(3))
    with pytest.raises(ValueError, match=r"out: got torch\.uint8, allowed is torch\.float32"):
        file.read_into("a", torch.zeros(2, 1, dtype=torch.uint8))


BROKEN = {
    "unknown dtype": ({"a": entry("F4")}, r"a: got dtype 'F4', allowed is BOOL"),
    "negative shape": ({"a": entry(shape=(-1,))}, r"a: got shape \[-1\], allowed is a list of integers from 0"),
    "fractional shape": ({"a": entry(shape=(1.0,))}, r"a: got shape \[1\.0\]"),
    "three offsets": ({"a": entry(offsets=(0, 4, 8))}, r"a: got data_offsets \[0, 4, 8\]"),
    "backward offsets": ({"a": entry(offsets=(4, 0))}, r"a: got data_offsets \[4, 0\]"),
    "negative offset": ({"a": entry(offsets=(-4, 0))}, r"a: got data_offsets \[-4, 0\]"),
    "size": ({"a": entry(offsets=(0, 3))}, r"a: 3 bytes, but F32 \[1\] takes 4"),
    "huge shape": ({"a": entry(shape=(2**40, 2**40))}, r"a: 4 bytes, but F32"),
    "beyond the end": ({"a": entry(offsets=(4, 8))}, r"a: ends at byte \d+ of a file of \d+; the file is truncated"),
    "far beyond": ({"a": entry("U8", (2**62,), (0, 2**62))}, r"a: ends at byte \d+ of a file"),
    "extra key": ({"a": entry(strides=[1])}, r"a: header entry .*, allowed is dtype, shape and data_offsets"),
    "no object": ({"a": 3}, r"a: header entry 3"),
    "trailing bytes": ({}, r"x\.safetensors: 4 bytes behind the header; copy the file again"),
    "hole": ({"a": entry("U8", (1,), (0, 1)), "b": entry("U8", (1,), (3, 4))}, r"2 unused bytes between a and b"),
    "overlap": (
        {"a": entry("U8", (3,), (0, 3)), "b": entry("U8", (2,), (2, 4))},
        r"b overlaps a; write",
    ),
    "list": ([1], r"header is list, allowed is an object"),
    "no json": (b"{nope", r"header is no JSON"),
    "no utf-8": (b'{"\xff": 1}', r"header is no JSON"),
    "nesting": (b"[" * 200_000, r"header is no JSON"),
    "twice": (b'{"a": 1, "a": 2}', r"header names a twice"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers(path, case):
    header, message = BROKEN[case]
    write(path, header, b"\0" * 4)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


def test_broken_lengths(path):
    with pytest.raises(CheckpointError, match="no such file; copy it or download it again"):
        SafetensorsFile(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="3 bytes, too short for a safetensors header"):
        SafetensorsFile(path)
    write(path, {}, length=2**63)
    with pytest.raises(CheckpointError, match="header of 9223372036854775808 bytes in a file of 10; it is truncated"):
        SafetensorsFile(path)


def test_truncated_while_in_use(path):
    write(path, {"a": entry("I8", (100,), (0, 100))}, b"\0" * 100)
    file = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(CheckpointError, match=r"ended at byte \d+ while reading"):
        file.read("a")


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 60))
def test_any_damage_is_one_error(tmp_path_factory, position, byte, cut):
    """One byte changed, some cut off the end: the file reads within its bounds or is refused, nothing else."""
    path = tmp_path_factory.mktemp("d") / "x.safetensors"
    write(path, {"a": entry("F32", (2, 3), (0, 24)), "b": entry("BF16", (4,), (24, 32))}, bytes(range(32)))
    raw = bytearray(path.read_bytes())
    raw[position % len(raw)] = byte
    path.write_bytes(raw[: len(raw) - cut])
    try:
        file = SafetensorsFile(path)
        for name in file.entries:
            file.read(name)
    except CheckpointError:
        pass


def test_offsets_beyond_32_bits(path):
    """A table of which only the last rows exist on disk; they lie behind 2^32 and 2^36 bytes."""
    rows, width = (1 << 36) // 256 + 7, 256
    header = {
        "table": entry("F8_E4M3", (rows, width), (0, rows * width)),
        "scale": entry("F8_E8M0", (rows, 8), (rows * width, rows * (width + 8))),
    }
    text = json.dumps(header).encode()
    begin = 8 + len(text)
    last = torch.arange(2 * width, dtype=torch.int64).remainder(120).to(torch.uint8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.seek(begin + (rows - 2) * width)
            file.write(last.numpy().tobytes())
            file.seek(begin + rows * (width + 8) - 8)
            file.write(bytes(range(100, 108)))
    except OSError as error:
        pytest.skip(f"no sparse file of 70 GB here: {error}")
    table = SafetensorsFile(path)
    assert table.read_rows("table", rows - 2, rows).view(torch.uint8).flatten().tolist() == last.tolist()
    mapped = table.map("table")
    assert mapped.shape == (rows, width) and mapped.dtype == torch.float8_e4m3fn
    assert mapped[rows - 1].view(torch.uint8).tolist() == last[width:].tolist()
    assert mapped[: rows : rows - 1][0].view(torch.uint8).tolist() == [0] * width
    assert table.map("scale")[-1].tolist() == list(range(100, 108))
    assert table.read_rows("scale", 5, 6).tolist() == [[0] * 8]
