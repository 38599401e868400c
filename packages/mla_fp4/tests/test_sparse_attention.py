"""Attention over window and selected rows against its reference, and what it may never depend on."""

import itertools

import pytest
import torch

import mla_fp4
from kernel_core import available_isas, formats, limit_isa, using
from kernel_core.attention import attend as oracle
from kernel_core.attention import window_keys
from kernel_core.testing import Guarded, assert_bitwise, assert_close, at_page_end
from mla_fp4.reference.attention import selected_keys

NANO = {"heads": 4, "dim": 64, "rope_dim": 16, "window": 32, "rows_per_block": 16, "selected": 16}
MINI = {"heads": 4, "dim": 512, "rope_dim": 64, "window": 128, "rows_per_block": 64, "selected": 64}
GARBAGE = 2**31 - 1
WINDOW_ARGUMENTS = ("new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos", "lower", "window")
SELECTED_ARGUMENTS = ("pages", "rows_per_block", "block_table", "cu_seqlens", "start_pos", "indices")


def build(
    lengths,
    starts,
    *,
    heads,
    dim,
    rope_dim,
    window,
    rows_per_block,
    selected,
    lower=None,
    visible=None,
    packed=True,
    holes=0.2,
    seed=0,
):
    """A ragged batch whose tables hold garbage beyond each request's length and whose index lists have holes."""
    g = torch.Generator().manual_seed(seed)
    rows, batch = sum(lengths), len(lengths)
    near, far = (formats.quantize_window, formats.quantize_main) if packed else (torch.clone, torch.clone)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    visible = [max(1, 3 * selected - 7 * b) for b in range(batch)] if visible is None else visible
    used = [-(-v // rows_per_block) for v in visible]
    blocks = sum(used) + 2
    table = torch.full((batch, max(used, default=0) + 2), GARBAGE, dtype=torch.int32)
    ids = torch.randperm(blocks - 1, generator=g) + 1
    for b, n in enumerate(used):
        table[b, :n] = ids[sum(used[:b]) : sum(used[:b]) + n].int()
    indices = torch.full((rows, selected), -1, dtype=torch.int32)
    row = 0
    for b, n in enumerate(lengths):
        for _ in range(n):
            k = min(selected, visible[b])
            indices[row, :k] = torch.randperm(visible[b], generator=g)[:k].sort().values.int()
            row += 1
    indices[torch.rand(rows, selected, generator=g) < holes] = -1
    return {
        "q": normal(rows, heads, dim),
        "new_rows": near(normal(rows, dim)),
        "ring": near(normal(batch + 2, window + 6, dim)),
        "ring_slot": (torch.randperm(batch + 1, generator=g)[:batch] + 1).int(),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "start_pos": torch.tensor(starts, dtype=torch.int64),
        "lower": torch.tensor(lower if lower is not None else [0] * batch, dtype=torch.int64),
        "window": window,
        "pages": far(normal(blocks, rows_per_block, dim)),
        "rows_per_block": rows_per_block,
        "block_table": table,
        "indices": indices,
        "sink": normal(heads),
        "rope": normal(rows, rope_dim),
        "scale": dim**-0.5,
    }


def attend(case, **changes):
    return mla_fp4.sparse_attention(**{**case, **changes})


def reference(case, **changes):
    with using("reference"):
        return attend(case, **changes)


def alone(case, row):
    """One row of the batch as a batch of one token, its earlier window keys moved to the ring."""
    b = int(torch.searchsorted(case["cu_seqlens"], row, right=True)) - 1
    first, start, size = int(case["cu_seqlens"][b]), int(case["start_pos"][b]), case["ring"].shape[1]
    position = start + row - first
    ring = torch.full_like(case["ring"], torch.nan if case["ring"].is_floating_point() else 255)[:1]
    for key in range(max(0, int(case["lower"][b]), position - case["window"] + 1), position):
        old = case["ring"][case["ring_slot"][b], key % size]
        ring[0, key % size] = old if key < start else case["new_rows"][first + key - start]
    one = slice(row, row + 1)
    return {
        **case,
        **{name: case[name][one] for name in ("q", "new_rows", "indices", "rope")},
        "ring": ring,
        "ring_slot": torch.zeros(1).int(),
        "cu_seqlens": torch.tensor([0, 1]).int(),
        "start_pos": torch.tensor([position]),
        "lower": case["lower"][b : b + 1],
        "block_table": case["block_table"][b : b + 1],
    }


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("lengths", "starts", "shape"),
    [
        ([1], [0], NANO),
        ([1, 1, 1], [0, 31, 1000], NANO),
        ([0, 5, 0, 39, 1], [7, 30, 0, 0, 131], NANO),
        ([34, 2], [100, 38], {**NANO, "heads": 3, "dim": 96, "rope_dim": 32, "selected": 5, "rows_per_block": 1}),
        ([7], [5], {**NANO, "heads": 1, "selected": 1, "window": 1}),
        ([2], [40], {**NANO, "heads": 64, "selected": 0}),
        ([6], [133], MINI),
        ([40], [120], {**MINI, "heads": 6}),
        ([1, 2], [127, 4096], {**MINI, "heads": 64, "selected": 512, "rows_per_block": 128}),
    ],
)
def test_matches_reference(isa, packed, lengths, starts, shape):
    case = build(lengths, starts, packed=packed, **shape)
    out = torch.full_like(case["q"], torch.nan)
    with limit_isa(isa):
        attend(case, out=out)
    assert_close(out, reference(case), atol=4e-6, rtol=1e-5, max_row_diff=1e-11)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("heads", [4, 64])
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_as_accurate_as_float32(isa, heads, spread):
    """Against float64, no instruction set errs more than plain float32 PyTorch does, but for a small factor."""
    case = build([12], [120], **{**MINI, "heads": heads})
    case["q"] *= spread  # large queries: sharp softmax, scores whose rounding matters
    window = window_keys(*(case[k] for k in WINDOW_ARGUMENTS))
    selected = selected_keys(*(case[k] for k in SELECTED_ARGUMENTS))
    keys, seen = torch.cat((window[0], selected[0]), 1), torch.cat((window[1], selected[1]), 1)
    exact = oracle(
        case["q"].double(), keys.double(), seen, *(case[k].double() for k in ("sink", "rope")), case["scale"]
    )
    with limit_isa(isa):
        error = (attend(case) - exact).abs()
    plain = (reference(case) - exact).abs()
    factor = 8 if isa == "scalar" else 2  # one lane adds 512 products one after another
    assert error.max() <= factor * plain.max() and error.mean() <= factor * plain.mean()


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("heads", [1, 3, 4, 64])
def test_rows_do_not_depend_on_the_batch(isa, packed, heads):
    case = build([50, 3, 1], [20, 64, 500], lower=[11, 0, 490], packed=packed, **{**NANO, "heads": heads})
    with limit_isa(isa):
        whole = attend(case)
        for row in (0, 1, 13, 31, 49, 50, 52, 53):
            assert_bitwise(whole[row : row + 1], attend(alone(case, row)), name=f"row {row}")


@pytest.mark.parametrize("isa", available_isas())
def test_rows_do_not_depend_on_the_batch_at_model_width(isa):
    case = build([9, 1], [122, 500], **{**MINI, "heads": 16})
    with limit_isa(isa):
        whole = attend(case)
        for row in (0, 5, 8, 9):
            assert_bitwise(whole[row : row + 1], attend(alone(case, row)), name=f"row {row}")


@pytest.mark.parametrize("isa", available_isas())
def test_holes_contribute_nothing(isa):
    """Moving the holes of an index list changes no bit; a list of holes is the window alone."""
    case = build([4], [50], holes=0.4, **NANO)
    packed_left = torch.stack([torch.cat((row[row >= 0], row[row < 0])) for row in case["indices"]])
    with limit_isa(isa):
        assert_bitwise(attend(case), attend(case, indices=packed_left))
        window_only = attend(case, indices=torch.full_like(case["indices"], -1))
        assert_bitwise(window_only, attend(case, indices=case["indices"][:, :0].contiguous()))
        empty = torch.empty(0, *case["pages"].shape[1:], dtype=torch.uint8)
        assert_bitwise(window_only, attend(case, indices=torch.full_like(case["indices"], -1), pages=empty))
        nothing = attend(case, indices=torch.full_like(case["indices"], -5), lower=torch.tensor([1000]))
    assert (nothing == 0).all()


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("poison", [0x7F, 0xFF])
@pytest.mark.parametrize("shape", [NANO, MINI])
def test_unreferenced_bytes_never_count(isa, poison, shape):
    """NaN in page 0, in every row no index names, in slot 0, and in ring rows outside the windows."""
    case = build([3, 20], [100, 8], lower=[90, 0], **shape)
    pages = torch.full_like(case["pages"], poison)
    for b in range(2):
        for j in case["indices"][case["cu_seqlens"][b] : case["cu_seqlens"][b + 1]].unique().tolist():
            if j >= 0:
                at = case["block_table"][b, j // shape["rows_per_block"]], j % shape["rows_per_block"]
                pages[at] = case["pages"][at]
    ring = torch.full_like(case["ring"], poison)
    for b, (start, low) in enumerate([(100, 90), (8, 0)]):
        for key in range(max(low, start - case["window"] + 1), start):
            at = case["ring_slot"][b], key % ring.shape[1]
            ring[at] = case["ring"][at]
    with limit_isa(isa):
        clean = attend(case)
        assert_bitwise(attend(case, pages=pages, ring=ring), clean)
        rows = case["new_rows"].clone()
        rows[10:] = poison
        later = attend(case, new_rows=rows)
        assert_bitwise(later[:10], clean[:10])
    assert later[10:].isnan().all()


@pytest.mark.parametrize("isa", available_isas())
def test_a_nan_row_reaches_only_who_selects_it(isa):
    case = build([20], [40], holes=0.0, **NANO)
    target = int(case["indices"][3, 5])
    at = int(case["block_table"][0, target // 16]), target % 16
    pages = case["pages"].clone()
    pages[at][-1] = 0x7F  # a NaN scale
    hit = (case["indices"] == target).any(1)
    with limit_isa(isa):
        clean, actual = attend(case), attend(case, pages=pages)
        nowhere = attend(case, pages=torch.full_like(pages, 0x7F), new_rows=torch.full_like(case["new_rows"], 0xFF))
        assert nowhere.isnan().all()
        assert_bitwise(attend(case), clean, name="after NaN everywhere")  # nothing stays in working memory
        for row in (0, 19):
            assert_bitwise(attend(alone(case, row)), clean[row : row + 1], name="alone, after NaN everywhere")
    assert actual[hit].isnan().all() and 0 < hit.sum() < 20
    assert_bitwise(actual[~hit], clean[~hit])


@pytest.mark.parametrize("isa", available_isas())
def test_a_token_seen_twice_counts_twice(isa):
    """The same row in the window and among the selected, and the same index listed twice: no deduplication."""
    case = build([1], [3], packed=False, **NANO)
    case["pages"][case["block_table"][0, 0], 0] = case["new_rows"][0]
    indices = torch.full_like(case["indices"], -1)
    indices[0, :2] = 0
    with limit_isa(isa):
        actual = attend(case, indices=indices, lower=torch.tensor([3]), sink=torch.full((4,), -torch.inf))
        once = attend(case, indices=indices, lower=torch.tensor([3]), sink=torch.zeros(4))
    turned = reference(case, indices=indices * 0 - 1, lower=torch.tensor([3]), sink=torch.full((4,), -torch.inf))
    assert_close(actual, turned, atol=1e-6, rtol=1e-5)
    weight = 3 * torch.exp(case["scale"] * (case["q"][0] @ case["new_rows"][0]))
    assert_close(once, turned * (weight / (weight + 1))[None, :, None], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("isa", available_isas())
def test_extreme_sinks(isa):
    case = build([5], [3], **{**NANO, "heads": 5})
    case["sink"] = torch.tensor([-torch.inf, torch.inf, 300.0, -300.0, 0.0])
    with limit_isa(isa):
        actual = attend(case)
    assert_close(actual, reference(case), atol=4e-6, rtol=1e-5)
    assert (actual[:, 1] == 0).all()


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("heads", [4, 64])
def test_threads_and_repeats_agree(isa, heads):
    case = build([40, 5, 1], [90, 0, 33], **{**NANO, "heads": heads})
    lone = alone(case, 12)
    threads = torch.get_num_threads()
    results = []
    try:
        with limit_isa(isa):
            for n in (1, 2, 2, 1):
                torch.set_num_threads(n)
                results.append((attend(case), attend(lone)))
    finally:
        torch.set_num_threads(threads)
    for (a, x), (b, y) in itertools.pairwise(results):
        assert_bitwise(a, b)
        assert_bitwise(x, y)
    assert_bitwise(results[0][0][12:13], results[0][1])


@pytest.mark.parametrize("isa", available_isas())
def test_every_main_code_and_scale(isa):
    """Each E2M1 code under each finite E4M3 scale, subnormal ones too, as the only key: the output is the row."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(8)
    packed = (codes[1::2] << 4 | codes[0::2]).view(8, 8)
    rows = [torch.cat((packed.flatten(), torch.full((8,), s, dtype=torch.uint8))) for s in range(256) if s & 127 != 127]
    pages = torch.stack(rows)[:, None].contiguous()
    case = build([len(rows)], [0], **{**NANO, "dim": 128, "rope_dim": 0, "selected": 1, "rows_per_block": 1})
    table = torch.arange(len(rows)).int()[None]
    indices = torch.arange(len(rows)).int()[:, None]
    with limit_isa(isa):
        actual = attend(
            case,
            pages=pages,
            block_table=table,
            indices=indices,
            lower=torch.tensor([10**6]),
            sink=torch.full((4,), -torch.inf),
        )
    assert torch.equal(actual, formats.dequantize_main(pages).expand(-1, 4, -1))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [NANO, {**NANO, "dim": 96, "heads": 17, "selected": 33}, MINI])
def test_nothing_outside_its_tensors_is_touched(isa, packed, shape):
    """Every input ends where its page ends, with no page behind it; the output has guard bytes around it."""
    case = build([5, 1], [30, 40], packed=packed, **shape)
    tight = {k: at_page_end(v) if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    # the last row of the last page, the last slot and the last row of its ring are in use
    last = case["pages"].shape[0] - 1
    tight["block_table"][1, 0] = last
    tight["indices"][5, -1] = shape["rows_per_block"] - 1
    tight["ring_slot"][1] = case["ring"].shape[0] - 1
    tight["ring_slot"][0] = 1
    out = Guarded(tuple(case["q"].shape))
    with limit_isa(isa):
        assert attend(tight, out=out.tensor) is out.tensor
        out.check()
        assert_bitwise(out.tensor, attend(tight))
    assert_close(out.tensor, reference(tight), atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("isa", available_isas())
def test_offsets_beyond_32_bits(isa):
    """Caches of more than 2^32 bytes, of which only the end is in use (the rest stays unmapped)."""
    case = build([3], [40], **{**MINI, "selected": 5})
    blocks, slots = 2**32 // (64 * 288) + 9, 2**32 // (134 * 528) + 9
    pages, ring = torch.empty(blocks, 64, 288, dtype=torch.uint8), torch.empty(slots, 134, 528, dtype=torch.uint8)
    used = case["pages"].shape[0]
    pages[-used:], ring[-1] = case["pages"], case["ring"][case["ring_slot"][0]]
    table = torch.where(case["block_table"] == GARBAGE, GARBAGE, case["block_table"] + blocks - used)
    far = {**case, "pages": pages, "ring": ring, "block_table": table, "ring_slot": torch.tensor([slots - 1]).int()}
    with limit_isa(isa):
        assert_bitwise(attend(far), attend(case))


def test_no_rows():
    assert attend(build([0, 0], [5, 0], **NANO)).shape == (0, 4, 64)


def test_registered_op():
    case = build([5, 4], [0, 40], **NANO)
    assert_bitwise(torch.ops.mla_fp4.sparse_attention(*case.values()), attend(case))
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    with pytest.raises(NotImplementedError, match=r"mla_fp4\.sparse_attention.*meta"):
        attend(meta)


def _with(tensor, at, value):
    changed = tensor.clone()
    changed[at] = value
    return changed


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda c: c["q"].double()),
        ("new_rows", lambda c: c["new_rows"][1:]),
        ("new_rows", lambda c: formats.dequantize_window(c["new_rows"])),
        ("pages", lambda c: formats.dequantize_main(c["pages"])),
        ("pages", lambda c: c["pages"][:, :-1].contiguous()),
        ("pages", lambda c: c["pages"].flatten(1)),
        ("window", lambda c: 39),
        ("rows_per_block", lambda c: 0),
        ("ring_slot", lambda c: c["ring_slot"] - 9),
        ("cu_seqlens", lambda c: torch.tensor([0, 6, 12]).int()),
        ("start_pos", lambda c: torch.tensor([0, -1])),
        ("block_table", lambda c: torch.full_like(c["block_table"], GARBAGE)),
        ("block_table", lambda c: torch.full_like(c["block_table"], -1)),
        ("block_table", lambda c: c["block_table"][:1]),
        ("indices", lambda c: _with(c["indices"], (8, 15), GARBAGE)),
        ("indices", lambda c: c["indices"].long()),
        ("indices", lambda c: c["indices"][:, ::2]),
        ("sink", lambda c: c["sink"][:3]),
        ("rope", lambda c: c["rope"][:, :15].contiguous()),
        ("out", lambda c: torch.empty(9, 64, 4).transpose(1, 2)),
    ],
)
def test_bad_input_is_named(name, change):
    case = build([5, 4], [0, 40], holes=0.0, **NANO)
    out = torch.full((9, 4, 64), 7.0)
    changed = {"out": out, name: change(case)}
    with pytest.raises(ValueError, match=rf"^{name}.*got.*allowed"):
        attend(case, **changed)
    assert (out == 7).all()
