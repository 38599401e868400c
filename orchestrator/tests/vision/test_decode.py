"""Encoded images of every kind, damaged ones, and ones that mean harm."""

from __future__ import annotations

import contextlib
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from orchestrator.vision import ImageLimits, ImageRefused
from orchestrator.vision.decode import decode_image
from orchestrator.vision.webp import webp_size

LIMITS = ImageLimits()


def decode(data: bytes, **limits) -> np.ndarray:
    image = decode_image(data, ImageLimits(**limits), "messages.0")
    assert image.mode == "RGB"
    return np.asarray(image)


def png(values: np.ndarray, depth: int = 8, chunks: bytes = b"") -> bytes:
    """Any depth and number of channels, by hand."""
    height, width, channels = values.shape
    dtype = ">u2" if depth == 16 else "u1"
    lines = b"".join(b"\0" + values[y].astype(dtype).tobytes() for y in range(height))
    head = struct.pack(">IIBBBBB", width, height, depth, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunks
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "JPEG"])
def test_formats(kit, kind):
    image = kit.noise(31, 17)
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    source = image.quantize(64) if kind == "GIF" else image
    got = decode(kit.encoded(source, kind, **options)).astype(int)
    expected = np.asarray(source.convert("RGB")).astype(int)
    assert got.shape == (17, 31, 3) and abs(got - expected).max() <= (40 if kind == "JPEG" else 0)


@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_depths_and_channels(depth, channels):
    """Grey is repeated, 16 bits lose their lower half, what is transparent is white."""
    top = (1 << depth) - 1
    values = np.random.default_rng(0).integers(0, top + 1, (5, 7, channels))
    if channels in (2, 4):
        values[..., -1] = np.where(np.arange(7) % 2, top, 0)
    got = decode(png(values, depth)).astype(int)
    colours = values[..., : 3 if channels >= 3 else 1] >> (depth - 8)
    if channels in (2, 4):
        colours = np.where(values[..., -1:] == top, colours, 255)
    assert (got == np.broadcast_to(colours, got.shape)).all()


def test_half_transparent_colours_are_mixed_with_white():
    got = decode(png(np.full((2, 2, 4), [200, 100, 0, 128])))
    assert abs(got[0, 0].astype(int) - [227, 177, 127]).max() <= 1


def test_palettes_and_keyed_colours(kit):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 9, 99, 199])
    assert (decode(kit.encoded(image)) == [9, 99, 199]).all()
    assert (decode(kit.encoded(image, "PNG", transparency=1)) == 255).all()
    assert (decode(kit.encoded(image, "GIF", transparency=1)) == 255).all()
    keyed = png(np.full((2, 2, 3), [10, 20, 30]), chunks=chunk(b"tRNS", struct.pack(">HHH", 10, 20, 30)))
    assert (decode(keyed) == 255).all()
    assert (decode(kit.encoded(Image.new("1", (4, 4), 1))) == 255).all()
    assert (decode(kit.encoded(Image.new("CMYK", (8, 8)), "JPEG")) >= 250).all()


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_stand_upright(kit, turn, kind):
    """Each of the eight notes of a camera, undone: the stored picture is the upright one, turned the other way."""
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255  # the upper left quarter
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
        5: upright.transpose(1, 0, 2), 6: np.rot90(upright, 1), 7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[turn]  # fmt: skip
    note = Image.Exif()
    note[0x0112] = turn
    data = kit.encoded(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=note)
    got = decode(data).astype(int)
    assert got.shape == upright.shape and abs(got - upright).max() <= 40


@pytest.mark.parametrize("note", [b"Exif\0\0broken", b"Exif\0\0II*\0\xff\xff\xff\xff", b""])
def test_broken_notes_do_not_matter(kit, note):
    assert decode(kit.encoded(kit.noise(20, 10), "JPEG", exif=note)).shape == (10, 20, 3)


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_unknown_orientations_do_not_matter(kit, value):
    note = Image.Exif()
    note[0x0112] = value
    assert decode(kit.encoded(kit.noise(20, 10), "JPEG", exif=note)).shape == (10, 20, 3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(kit, kind):
    first, *others = (Image.new("RGB", (40, 30), colour) for colour in ("red", "lime", "blue"))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = kit.encoded(first, kind, save_all=True, append_images=others, **options)
    assert (decode(data) == [255, 0, 0]).all()


def test_of_a_camera_s_several_pictures_the_first_is_taken(kit):
    first, other = Image.new("RGB", (40, 30), "red"), Image.new("RGB", (40, 30), "blue")
    got = decode(kit.encoded(first, "MPO", save_all=True, append_images=[other]))
    assert abs(got.astype(int) - [254, 0, 0]).max() <= 4


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO", "TGA"])
def test_other_formats_are_refused(kit, kind):
    with pytest.raises(ImageRefused, match=r"messages\.0: the image cannot be decoded") as caught:
        decode(kit.encoded(kit.noise(32, 32), kind))
    assert caught.value.status == 400


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_cut_files_are_refused_wherever_they_are_cut(kit, kind):
    data = kit.encoded(kit.noise(64, 48), kind)
    refused = 0
    for length in [*range(0, 64), *range(64, len(data), max(1, len(data) // 40))]:
        try:
            decode(data[:length])
        except ImageRefused:
            refused += 1
        else:
            assert length > 0.97 * len(data), f"{length} of {len(data)} bytes were taken for a whole image"
    assert refused > 90


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_damage_is_refused_or_harmless(kit, data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]))
    content = bytearray(kit.encoded(kit.noise(24, 16), kind))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ImageRefused):
        decode(bytes(content), max_pixels=10_000)


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBP"]),
)
def test_bytes_that_are_no_image(tail, head):
    with pytest.raises(ImageRefused):
        decode(head + tail)


def huge_png(side: int) -> bytes:
    """A few kilobytes that would become gigabytes."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    )


def huge_webp(form: bytes, width: int, height: int) -> bytes:
    if form == b"VP8X":
        body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    elif form == b"VP8L":
        body = b"\x2f" + (width - 1 | height - 1 << 14).to_bytes(4, "little") + bytes(5)
    else:
        body = bytes(3) + b"\x9d\x01\x2a" + width.to_bytes(2, "little") + height.to_bytes(2, "little")
    return b"RIFF" + struct.pack("<I", 100) + b"WEBP" + form + struct.pack("<I", len(body)) + body + bytes(64)


BOMBS = {
    "png side": huge_png(20_000),
    "png pixels": huge_png(8192),
    "png beyond the library": huge_png(60_000),
    "gif": b"GIF89a"
    + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0)
    + b","
    + struct.pack("<HHHHBB", 0, 0, 65535, 65535, 0, 8)
    + b"\x04abcd\0;",
    "webp canvas": huge_webp(b"VP8X", 1 << 24, 1 << 8),
    "webp lossless": huge_webp(b"VP8L", 16383, 16383),
    "webp": huge_webp(b"VP8 ", 16383, 16383),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_by_their_size(name, monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels were decoded"))
    with pytest.raises(ImageRefused, match=r"pixels") as caught:
        decode(BOMBS[name], max_pixels=2**25)
    assert caught.value.status == 400


def test_texts_in_a_file_do_not_grow():
    """A compressed comment of 200 MB."""
    text = b"comment\0\0" + zlib.compress(bytes(200 * 10**6), 9)
    with pytest.raises(ImageRefused):
        decode(png(np.zeros((2, 2, 3), int), chunks=chunk(b"zTXt", text)))


@pytest.mark.parametrize(
    ("limits", "allowed"), [({"max_side": 30}, "30 a side"), ({"max_pixels": 599}, "allowed are 599")]
)
def test_limits_are_met_exactly(kit, limits, allowed):
    data = kit.encoded(kit.noise(30, 20))
    assert decode(data, max_side=30, max_pixels=600).shape == (20, 30, 3)
    with pytest.raises(ImageRefused, match=allowed):
        decode(kit.encoded(kit.noise(31, 20)) if "max_side" in limits else data, **limits)


def test_sizes_of_webp_files(kit):
    for width, height in ((1, 1), (640, 3), (16383, 2)):
        for options in ({}, {"lossless": True}):
            assert webp_size(kit.encoded(kit.noise(width, height), "WEBP", **options)) == (width, height)
        moving = kit.encoded(
            kit.noise(width, height), "WEBP", save_all=True, append_images=[kit.noise(width, height, 1)]
        )
        assert webp_size(moving) == (width, height)
    assert webp_size(kit.encoded(kit.noise(8, 8))) is None and webp_size(b"RIFF") is None


def test_empty():
    with pytest.raises(ImageRefused, match=r"messages\.0: the image is empty"):
        decode(b"")


def test_a_jpeg_of_very_many_scans_is_refused(kit):
    """Such files keep a decoder busy for minutes; ordinary progressive ones are taken."""
    data = kit.encoded(kit.noise(64, 48), "JPEG", progressive=True)
    assert decode(data).shape == (48, 64, 3) and 5 < data.count(b"\xff\xda") < 64
    first = data.index(b"\xff\xda")
    scan = data[first : data.index(b"\xff\xc4", first)]
    with pytest.raises(ImageRefused, match="more than 64 scans"):
        decode(data[:first] + scan * 60 + data[first:])
