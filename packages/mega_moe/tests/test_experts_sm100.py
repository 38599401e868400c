"""The SM100 expert kernels: their arithmetic, their own code on host threads, and the way to the compiled module."""

import ctypes
from pathlib import Path

import pytest
import torch

import kernel_core
import mega_moe
from kernel_core import formats
from kernel_core.testing.bindings import FakeModule
from kernel_core.testing.host import address, host_library
from mega_moe import reference
from mega_moe.cuda import experts_sm100 as sm100

HERE = Path(__file__).parent
EMULATION = HERE.parents[1] / "mla_fp4" / "tests" / "host"
POISON = -12345.0


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    if not EMULATION.is_dir():
        pytest.skip("needs the thread emulation of mla_fp4's tests")
    folders = (HERE.parent / "csrc", EMULATION, HERE / "host/stub")
    library = host_library(HERE / "host/expert_threads_sm100.cpp", tmp_path_factory.mktemp("experts_sm100"), *folders)
    library.tiles_at_most.argtypes, library.tiles_at_most.restype = (
        [*[ctypes.c_int64] * 3, ctypes.c_int, ctypes.c_int64],
        ctypes.c_int64,
    )
    return library


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_instruction_descriptor(lib):
    """Fields by the table of the instruction set for kind::mxf8f6f4."""
    for m, n, byte in ((128, 16, 0), (128, 64, 3), (256, 96, 2), (256, 256, 1)):
        d = lib.mx_kind(1, m, n, byte) & 0xFFFFFFFF
        assert (lib.mx_kind(0, m, n, byte) ^ d) & 0xFFFFFFFF == 5 << 7  # the shared expert's rows are E4M3
        assert (d & 15, d >> 4 & 3, d >> 6 & 1) == (0, byte, 0)  # dense; which byte of B's scales
        assert (d >> 7 & 7, d >> 10 & 7) == (5, 0)  # E2M1, E4M3
        assert (d >> 13 & 15, d >> 17 & 63) == (0, n // 8)  # neither negated nor transposed
        assert (d >> 23 & 1, d >> 24 & 7, d >> 27 & 3) == (1, 0, m // 128)  # UE8M0
        assert (d >> 29 & 3, d >> 31) == (byte, 0)


def test_operands_in_shared_memory(lib):
    """16 codes in the first eight of 16 bytes; values one to a byte; both with the 128-byte swizzle."""
    values = [lib.place_of_value(row, k) for row in range(128) for k in range(128)]
    assert sorted(values) == list(range(128 * 128))
    assert all(place == n ^ (n >> 7 & 7) << 4 for n, place in enumerate(values))
    codes = [lib.place_of_code(row, k) for row in range(128) for k in range(0, 128, 2)]
    assert len(set(codes)) == len(codes) and all(place % 16 < 8 for place in codes)
    for row, k in ((0, 0), (3, 18), (9, 126)):
        assert lib.place_of_code(row, k) // 16 == lib.place_of_value(row, k) // 16


def test_scale_order(lib):
    """Rows of four lane quarters stand beside each other, a word of four bytes each."""
    places = {(row, part): lib.place_of_scale(row, part) for row in range(128) for part in range(4)}
    assert sorted(places.values()) == list(range(512))
    assert all(place == row % 32 * 16 + row // 32 * 4 + part for (row, part), place in places.items())


@pytest.mark.parametrize("gated", [True, False])
def test_scales_are_packed_for_the_kernels(lib, gated):
    experts, d, inter = 2, 512, 256
    rows, columns = (2 * inter, d) if gated else (d, inter)
    scale = torch.randint(0, 256, (experts, rows, columns // 32), dtype=torch.uint8)
    packed = sm100.pack_scales(scale, gated=gated)
    assert torch.equal(sm100.unpack_scales(packed, rows, gated=gated), scale)
    steps, flat = columns // 128, scale.flatten(0, 1)
    images = packed.view(experts, rows // 256, steps, 2, 512)
    for expert, block, step, product, row, part in (
        (0, 0, 0, 0, 0, 0),
        (1, 1, steps - 1, 1, 77, 3),
        (1, 0, 1, 0, 127, 2),
    ):
        at = lib.row_of(int(not gated), inter, d, expert, block, product) + row
        want = flat[at, step * 4 + part]
        assert images[expert, block, step, product, lib.place_of_scale(row, part)] == want


def test_experts_are_packed_and_unpacked(weights):
    _, _, _, given = problem(weights, 1, 3, 2)
    shared = weights.shared(512, 256)
    packed = sm100.pack_where_it_fits(*given, shared)
    *got, same = sm100.unpack_experts(packed)
    assert all(torch.equal(a, b) for a, b in zip(got, given, strict=True))
    assert all(torch.equal(a.view(torch.uint8), vars(same)[name].view(torch.uint8)) for name, a in vars(shared).items())
    assert sm100.unpack_experts(sm100.pack_experts(*given))[4] is None
    assert sm100.pack_where_it_fits(*given, weights.shared(512, 128)) is None
    narrow = given[0], given[1], given[2][..., :96].contiguous(), given[3][..., :6].contiguous()
    assert sm100.pack_where_it_fits(*narrow, None) is None


def test_product_columns(lib):
    assert [lib.columns_of(1, rows) for rows in (1, 16, 17, 64)] == [16, 16, 32, 64]
    assert [lib.columns_of(2, rows) for rows in (1, 32, 33, 96)] == [32, 32, 64, 96]


def test_activation_scales(lib):
    """The model's rule, and that its reciprocal needs no division."""
    amax = torch.cat((torch.rand(500) * 2.0 ** torch.randint(-60, 60, (500,)), torch.tensor([0.0, 448.0, 1e-4, 3e38])))
    values = (ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_uint32())
    for bits in (*amax.view(torch.int32).tolist(), 0x7F800000, 0x7FC00000):
        lib.scale_of(bits, *[ctypes.byref(v) for v in values])
        byte, inverse, divided = (v.value for v in values)
        assert inverse == divided if byte < 255 else inverse == 0x7FC00000
        assert 105 <= byte <= 255


def test_work_covers_every_row_once(lib):
    counts = [0, 3, 64, 0, 65, 200, 1, 0]
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    blocks, tokens = 3, 64
    tiles = sum(-(-count // tokens) for count in counts)
    out = torch.full((tiles * blocks + 1, 5), -7, dtype=torch.int32)
    lib.all_work(address(offsets), len(counts), blocks, tokens, address(out))
    assert (out[-1] == -7).all() and tiles <= lib.tiles_at_most(sum(counts), 1, len(counts), 0, tokens)
    seen = torch.zeros(blocks, sum(counts))
    for expert, block, _, rows, first in out[:-1].tolist():
        assert offsets[expert] <= first and first + rows <= offsets[expert + 1] and 0 < rows <= tokens
        seen[block, first : first + rows] += 1
    assert (seen == 1).all()
    assert sorted({(t, b) for _, b, t, _, _ in out[:-1].tolist()}) == [
        (t, b) for t in range(tiles) for b in range(blocks)
    ]


# --- the kernels' own code -------------------------------------------------------------------------------------------


def sorted_rows(ids, experts, shared):
    flat = ids.flatten().long()
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    rows = flat.argsort(stable=True).int()
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    offsets = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    if shared:  # one more expert
        rows = torch.cat((rows[: offsets[-1]], torch.arange(ids.numel(), ids.numel() + len(ids)).int()))
        offsets = torch.cat((offsets, offsets[-1:] + len(ids)))
    return offsets, rows


def run(lib, x, ids, gains, packed, shape, *, groups=2, limit=10.0):
    tokens, d = x.shape
    slots, experts, inter = ids.shape[1], packed.w13.shape[0], packed.inter
    shared = packed.shared13 is not None
    offsets, rows = sorted_rows(ids, experts, shared)
    tiles, step = lib.tiles_at_most(tokens, slots, experts, shared, shape[0]), 512 + shape[0] * 128
    images = torch.full((tiles * d // 128 * step + 16,), 255, dtype=torch.uint8)
    hidden = torch.full((tiles * inter // 128 * step + 16,), 255, dtype=torch.uint8)
    parts = torch.full((tokens * (slots + shared) * d + 16,), torch.nan)
    out = torch.full((tokens + 1, d), POISON, dtype=x.dtype)
    tensors = (
        x,
        ids,
        gains,
        offsets,
        rows,
        packed.w13,
        packed.w2,
        packed.scale13,
        packed.scale2,
        out,
        images,
        hidden,
        parts,
    )
    tensors += (packed.shared13, packed.shared2)
    pointers = torch.tensor([0 if t is None else t.data_ptr() for t in tensors])
    is_float = int(x.dtype is torch.float32)
    numbers = torch.tensor([is_float, tokens, slots, d, inter, experts, is_float, *shape, groups])
    lib.run_experts(address(pointers), address(numbers), ctypes.c_float(limit))
    assert (out[tokens] == POISON).all() and (images[-16:] == 255).all() and (hidden[-16:] == 255).all()
    assert parts[-16:].isnan().all()
    return out[:tokens]


def mxfp8(x):
    """E4M3 with UE8M0 scales for 32 values, and back: the model's activations."""
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def expert(x, w13, w2, gain, limit):
    """float64 products of MXFP8 rows; hidden rows quantised as well."""
    gate, up = (w13.double() @ mxfp8(x).double()).chunk(2)
    h = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * gain
    return w2.double() @ mxfp8(h.float()).double()


def expected(x, ids, gains, given, limit=10.0, shared=None):
    w13, s13, w2, s2 = given
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in [(t, s) for s in range(ids.shape[1]) for t in range(len(x))]:
        at = int(ids[token, slot])
        if not 0 <= at < len(w13):
            continue
        first, second = reference.dequantize_mxfp4(w13[at], s13[at]), reference.dequantize_mxfp4(w2[at], s2[at])
        out[token] += expert(x[token], first, second, gains[token, slot], limit)
    if shared is not None:
        first, second = reference.dequantize(shared.w13, shared.s13), reference.dequantize(shared.w2, shared.s2)
        out += torch.stack([expert(row, first, second, 1.0, limit) for row in x])
    return out


def problem(weights, tokens, experts, slots, d=512, inter=256):
    w13, s13 = (t.view(experts, 2 * inter, -1) for t in weights.mxfp4(experts * 2 * inter, d))
    w2, s2 = (t.view(experts, d, -1) for t in weights.mxfp4(experts * d, inter))
    ids, gains = weights.routing(tokens, experts, slots)
    return weights.normal(tokens, d), ids, gains, (w13, s13, w2, s2)


def close(got, want):
    error = (got.double() - want).norm() / want.norm()
    return float(error)


@pytest.mark.parametrize("shape", sm100.SHAPES)
def test_kernels(lib, weights, shape):
    """Ragged tiles, an expert without rows, empty slots; a row does not depend on others."""
    x, ids, gains, given = problem(weights, 19, 4, 2)
    ids[ids == 2] = 3
    ids[5, 1], ids[7] = -1, torch.tensor([-1, 99], dtype=torch.int32)
    packed = sm100.pack_experts(*given)
    got = run(lib, x, ids, gains, packed, shape)
    # A hidden value beside the middle of two codes may go either way: float32 against float64
    assert close(got, expected(x, ids, gains, given)) < 2e-3
    assert (got[7] == 0).all()
    if shape == sm100.SHAPES[0]:
        alone = run(lib, x[4:5].clone(), ids[4:5].clone(), gains[4:5].clone(), packed, shape, groups=1)
        assert torch.equal(alone[0], got[4])
    else:
        assert torch.equal(got, run(lib, x, ids, gains, packed, sm100.SHAPES[0], groups=3))


@pytest.mark.parametrize("shape", [(16, 1), (64, 2)])
def test_the_shared_expert_is_one_more(lib, weights, shape):
    x, ids, gains, given = problem(weights, 18, 3, 2)
    ids[3] = -1
    shared = weights.shared(512, 256)
    packed = sm100.pack_experts(*given, shared)
    got = run(lib, x, ids, gains, packed, shape)
    assert close(got, expected(x, ids, gains, given, shared=shared)) < 2e-3
    nobody = run(lib, x[3:4].clone(), ids[3:4].clone(), gains[3:4].clone(), packed, shape)
    assert torch.equal(nobody[0], got[3])


def test_more_tiles_than_one(lib, weights):
    """One hot expert whose rows fill several tiles, more items than buffers and stages."""
    x, ids, gains, given = problem(weights, 70, 2, 1)
    ids[:] = 1
    packed = sm100.pack_experts(*given)
    got = run(lib, x, ids, gains, packed, (16, 1), groups=1)
    assert close(got, expected(x, ids, gains, given)) < 2e-3
    assert torch.equal(got, run(lib, x, ids, gains, packed, (64, 2), groups=1))


def test_bfloat16_rows(lib, weights):
    x, ids, gains, given = problem(weights, 3, 2, 2)
    packed = sm100.pack_experts(*given)
    got = run(lib, x.bfloat16(), ids, gains, packed, (16, 1))
    assert torch.equal(got, run(lib, x.bfloat16().float(), ids, gains, packed, (16, 1)).bfloat16())


def test_nan_and_clamps_stay_in_their_row(lib, weights):
    x, ids, gains, given = problem(weights, 3, 2, 2)
    packed = sm100.pack_experts(*given)
    clean = run(lib, x, ids, gains, packed, (16, 1), limit=0.5)
    assert close(clean, expected(x, ids, gains, given, limit=0.5)) < 2e-3
    x[1, 300] = torch.nan
    got = run(lib, x, ids, gains, packed, (16, 1), limit=0.5)
    assert got[1].isnan().all() and torch.equal(got[::2], clean[::2])


def test_activations_are_the_packages_format(weights):
    """The rule of this file against the formats of kernel_core: one definition."""
    x = weights.normal(4, 512) * 2.0 ** torch.arange(-20, 20, 10).unsqueeze(1)
    assert torch.equal(formats.dequantize_window(formats.quantize_window(x)), mxfp8(x))


# --- the way to the module -------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    module = FakeModule(HERE.parent / "csrc" / "cuda", {"experts_sm100_sizes": (64, 64, 64)})
    monkeypatch.setattr(sm100, "cuda_module", lambda _: module)
    monkeypatch.setattr(sm100, "stream", lambda _: 77)
    monkeypatch.setattr(sm100, "multiprocessors", lambda _: 148)
    order = torch.zeros(5, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    monkeypatch.setattr(sm100, "permute", lambda *_, **__: order)
    return module


def test_call(fake, weights):
    x, ids, gains, given = problem(weights, 3, 4, 2)
    packed = sm100.pack_experts(*given)
    out = torch.empty_like(x)
    assert sm100.fused_experts(x, ids, gains, packed, limit=10.0, out=out) is out
    call = dict(fake.calls)["experts_sm100"]
    assert (call["tokens"], call["slots"], call["d"], call["inter"], call["experts"]) == (3, 2, 512, 256, 4)
    assert (call["tile"], call["ctas"], call["grid"], call["stream"]) == (16, 1, 148, 77)
    assert call["shared13"] == call["shared2"] == 0
    assert call["w13"] == given[0].data_ptr() and call["x_is_float"] and call["out"] == out.data_ptr()
    fake.calls.clear()
    sm100.fused_experts(x[:0], ids[:0], gains[:0], packed, limit=10.0)
    assert not fake.calls
    with pytest.raises(ValueError, match="tile"):
        sm100.experts(x, ids, gains, packed, ids, ids, limit=10.0, tile=(16, 2))


def test_the_packed_op_takes_this_path(fake, weights, monkeypatch):
    x, ids, gains, given = problem(weights, 3, 4, 2)
    shared = weights.shared(512, 256)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    packed = mega_moe.pack_for(torch.device("cuda"), *given, shared)
    assert isinstance(packed, sm100.PackedExpertsSm100)
    whole = mega_moe.fused_experts(x, ids, gains, *given, shared=shared)
    assert torch.equal(mega_moe.packed_experts(x, ids, gains, packed), whole) and not fake.calls  # a CPU
    monkeypatch.setattr(sm100, "fits", lambda *_: True)
    monkeypatch.setattr(kernel_core, "elsewhere", lambda _, __, kernels=False: "cuda" if kernels else "library")
    out = torch.empty_like(x)
    assert mega_moe.packed_experts(x, ids, gains, packed, out=out) is out
    call = dict(fake.calls)["experts_sm100"]
    assert call["shared13"] == shared.w13.data_ptr() and call["out"] == out.data_ptr() and call["limit"] == 10.0


def test_device_and_sizes(weights, monkeypatch):
    x, _, _, given = problem(weights, 3, 4, 2)
    packed = sm100.pack_experts(*given)
    for capability, fits in (((10, 0), True), ((10, 3), False), ((9, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        even = packed.w13.data_ptr() % 32 == 0 and packed.w2.data_ptr() % 32 == 0
        assert sm100.fits(packed, x) == (fits and even)
    with pytest.raises(ValueError, match="256"):
        sm100.pack_experts(given[0], given[1], given[2][:, :128], given[3])


def test_shape_follows_the_mean():
    assert [sm100.shape(48 * mean, 48, 5120, 2304) for mean in (1, 16, 17, 64, 65, 1000)] == [
        (16, 1), (16, 1), (64, 2), (64, 2), (96, 2), (96, 2),
    ]  # fmt: skip
    assert sm100.shape(4800, 48, 768, 384) == (64, 1)
