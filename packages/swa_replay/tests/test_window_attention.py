"""Window attention against its reference, and what it may never depend on."""

import itertools

import pytest
import torch

import swa_replay
from kernel_core import available_isas, formats, limit_isa, using
from kernel_core.testing import Guarded, at_page_end

NANO = {"heads": 4, "dim": 64, "rope_dim": 16, "window": 32}
MINI = {"heads": 4, "dim": 512, "rope_dim": 64, "window": 128}


def attend(case, **changes):
    return swa_replay.window_attention(**{**case, **changes})


def reference(case, **changes):
    with using("reference"):
        return attend(case, **changes)


def select(case, rows):
    """The same rows as requests of their own: one token each, everything before it in a private ring."""
    window, dim = case["window"], case["q"].shape[2]
    request = [
        b for b in range(len(case["start_pos"])) for _ in range(case["cu_seqlens"][b], case["cu_seqlens"][b + 1])
    ]
    ring = torch.full((len(rows), window + 6, case["ring"].shape[2]), 255, dtype=case["ring"].dtype)
    if ring.is_floating_point():
        ring.fill_(torch.nan)
    starts = []
    for i, t in enumerate(rows):
        b = request[t]
        start, first = int(case["start_pos"][b]), int(case["cu_seqlens"][b])
        p = start + t - first
        starts.append(p)
        for key in range(max(0, int(case["lower"][b]), p - window + 1), p):
            if key < start:
                ring[i, key % ring.shape[1]] = case["ring"][case["ring_slot"][b], key % case["ring"].shape[1]]
            else:
                ring[i, key % ring.shape[1]] = case["new_rows"][first + key - start]
    assert dim == case["q"].shape[2]
    return {
        **case,
        "q": case["q"][rows],
        "new_rows": case["new_rows"][rows],
        "rope": case["rope"][rows],
        "ring": ring,
        "ring_slot": torch.arange(len(rows)).int(),
        "cu_seqlens": torch.arange(len(rows) + 1).int(),
        "start_pos": torch.tensor(starts),
        "lower": torch.tensor([int(case["lower"][request[t]]) for t in rows]),
    }


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("lengths", "starts", "shape"),
    [
        ([1], [0], NANO),
        ([1, 1, 1], [0, 31, 1000], NANO),
        ([0, 5, 0, 38, 1], [7, 30, 0, 0, 131], NANO),
        ([33], [5], {**NANO, "heads": 1, "window": 1}),
        ([90, 2], [100, 38], {**NANO, "heads": 3, "dim": 96, "rope_dim": 32}),
        ([6], [133], MINI),
        ([40], [120], {**MINI, "heads": 6}),
        ([2, 1], [127, 4096], {**MINI, "heads": 64}),
        ([3], [40], {**NANO, "rope_dim": 0, "heads": 17}),
    ],
)
def test_matches_reference(window_case, isa, packed, lengths, starts, shape):
    case = window_case(lengths, starts, packed=packed, **shape)
    with limit_isa(isa):
        actual = attend(case)
    torch.testing.assert_close(actual, reference(case), atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("packed", [True, False])
def test_rows_do_not_depend_on_the_cut(window_case, isa, packed):
    """A row computed in a long chunk, in a batch, or alone with its keys in the ring: the same bits."""
    case = window_case([70, 3, 1], [20, 64, 500], lower=[11, 0, 490], packed=packed, **NANO)
    rows = [0, 1, 12, 33, 52, 69, 70, 72, 73]
    with limit_isa(isa):
        whole = attend(case)
        alone = attend(select(case, rows))
        assert torch.equal(whole[rows], alone)
        for row in rows[::3]:
            assert torch.equal(whole[[row]], attend(select(case, [row])))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [NANO, {**MINI, "heads": 64}, {**NANO, "heads": 17, "window": 1}])
def test_block_rows_see_each_other(window_case, isa, packed, shape):
    """Draft blocks: all new rows of the request and the window before them, for every row alike."""
    window = shape["window"]
    case = window_case(
        [5, 0, 1, 5, 7], [300, 4, 0, 3, max(0, window - 2)], lower=[290, 0, 0, 1, 0], packed=packed, **shape
    )
    with limit_isa(isa):
        actual = attend(case, block=True)
        torch.testing.assert_close(actual, reference(case, block=True), atol=4e-6, rtol=1e-5)
        # the same query and angles at another place of its block: the same bits
        for name in ("q", "rope"):
            case[name][4] = case[name][0]
        twins = attend(case, block=True)
        assert torch.equal(twins[0], twins[4]) and torch.equal(twins[0], actual[0])
        # a block of one row is the causal case with one more position of history
        one = select(case, [2])
        wider = window_case([1], [0], packed=packed, **{**shape, "window": window + 1})
        wider.update({k: one[k] for k in ("q", "new_rows", "rope", "start_pos", "lower")}, sink=case["sink"])
        ring = torch.zeros_like(wider["ring"][:1])
        for key in range(max(0, int(one["start_pos"][0]) - window), int(one["start_pos"][0])):
            ring[0, key % ring.shape[1]] = one["ring"][0, key % one["ring"].shape[1]]
        if int(one["lower"][0]) > int(one["start_pos"][0]) - window:  # all of it is in the ring
            ring_slot = torch.zeros(1).int()
            causal = attend(wider, ring=ring, ring_slot=ring_slot, cu_seqlens=torch.tensor([0, 1]).int())
            assert torch.equal(attend(one, block=True), causal)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("shape", [NANO, MINI])
def test_chunks_and_tokens_agree(window_case, isa, shape):
    """Prefill in chunks of any size, longer than the ring too, equals token by token, bit by bit."""
    length = 75 if shape is NANO else 140
    case = window_case([length], [0], **shape)
    q, rows, rope = case["q"], case["new_rows"], case["rope"]

    def run(chunks):
        ring, results, at = case["ring"].clone(), [], 0
        for n in chunks:
            step = {
                **case,
                "q": q[at : at + n],
                "new_rows": rows[at : at + n],
                "rope": rope[at : at + n],
                "ring": ring,
                "start_pos": torch.tensor([at]),
                "cu_seqlens": torch.tensor([0, n]).int(),
            }
            results.append(attend(step))
            swa_replay.store_window(
                *(step[k] for k in ("new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos")),
                floor=torch.zeros(1).long(),
            )
            at += n
        return torch.cat(results), ring

    with limit_isa(isa):
        whole, ring = run([length])
        tokens, ring_of_tokens = run([1] * length)
        ragged, ring_of_chunks = run([n for n in (3, 40, 1, 7, length) if n < length] + [length - 51])
    assert torch.equal(whole, tokens) and torch.equal(whole, ragged)
    assert torch.equal(ring, ring_of_tokens) and torch.equal(ring, ring_of_chunks)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("poison", [0x7F, 0xFF])
def test_unreferenced_bytes_never_count(window_case, isa, poison):
    """NaN in slot 0, in other requests' slots, in ring rows outside the windows, in rows of other requests."""
    case = window_case([3, 50], [100, 8], lower=[90, 0], **NANO)
    with limit_isa(isa):
        clean = attend(case)
        ring = torch.full_like(case["ring"], poison)
        for b, (start, low) in enumerate([(100, 90), (8, 0)]):
            slot, size = case["ring_slot"][b], ring.shape[1]
            for key in range(max(low, start - case["window"] + 1), start):
                ring[slot, key % size] = case["ring"][slot, key % size]
        assert torch.equal(attend(case, ring=ring), clean)
        rows = case["new_rows"].clone()
        rows[3:] = poison  # the other request
        assert torch.equal(attend(case, new_rows=rows)[:3], clean[:3])
        rows = case["new_rows"].clone()
        rows[20:] = poison  # later rows of the same request
        assert torch.equal(attend(case, new_rows=rows)[:20], clean[:20])
        assert attend(case, new_rows=rows)[20:].isnan().all()


@pytest.mark.parametrize("isa", available_isas())
def test_threads_and_repeats_agree(window_case, isa):
    case = window_case([64, 5, 1], [90, 0, 33], **{**MINI, "heads": 16})
    threads = torch.get_num_threads()
    try:
        with limit_isa(isa):
            results = []
            for n in (1, 2, 2, 1):
                torch.set_num_threads(n)
                results.append(attend(case))
    finally:
        torch.set_num_threads(threads)
    for a, b in itertools.pairwise(results):
        assert torch.equal(a, b)


@pytest.mark.parametrize("isa", available_isas())
def test_extreme_sinks(window_case, isa):
    case = window_case([5], [3], **{**NANO, "heads": 5})
    case["sink"] = torch.tensor([-torch.inf, torch.inf, 300.0, -300.0, 0.0])
    with limit_isa(isa):
        actual = attend(case)
    torch.testing.assert_close(actual, reference(case), atol=4e-6, rtol=1e-5)
    assert (actual[:, 1] == 0).all()
    no_sink = attend(case, sink=torch.full((5,), -torch.inf))
    assert torch.equal(no_sink[:, 0], attend(case)[:, 0])


@pytest.mark.parametrize("isa", available_isas())
def test_rows_without_keys_are_zero(window_case, isa):
    case = window_case([4], [10], lower=[12], **NANO)
    case["sink"][0] = -torch.inf
    with limit_isa(isa):
        actual = attend(case)
    assert (actual[:2] == 0).all() and (actual[2:] != 0).any(-1).all()
    torch.testing.assert_close(actual, reference(case), atol=4e-6, rtol=1e-5)


def test_large_scores_do_not_overflow(window_case):
    case = window_case([4], [60], **NANO)
    case["q"] *= 1e6
    torch.testing.assert_close(attend(case), reference(case), atol=1e-5, rtol=1e-5)


def test_positions_near_a_million(window_case):
    case = window_case([9], [(1 << 20) - 4], **NANO)
    torch.testing.assert_close(attend(case), reference(case), atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("isa", available_isas())
def test_extreme_scales_decode_exactly(window_case, isa):
    """Scales that shortcuts cannot take: the smallest, the largest, NaN; and subnormal codes."""
    case = window_case([3], [0], **NANO)
    rows = case["new_rows"]
    rows[0, :64] = torch.randint(0, 8, (64,), dtype=torch.uint8) | torch.randint(0, 2, (64,), dtype=torch.uint8) * 128
    rows[0, 64:] = torch.tensor([8, 127], dtype=torch.uint8)
    rows[1, 64:] = torch.tensor([1, 110], dtype=torch.uint8)
    case["q"][2] *= 1e-2
    with limit_isa(isa):
        torch.testing.assert_close(attend(case), reference(case), atol=4e-6, rtol=1e-5)
        rows[2, 64] = 255
        actual = attend(case)
    assert actual[2].isnan().all() and not actual[:2].isnan().any()


@pytest.mark.parametrize("isa", available_isas())
def test_every_window_code_and_scale(window_case, isa):
    """Each finite E4M3 code under scales of every kind, as the only key: the output is the row, exactly.

    Subnormal float32 values may become zero: the tile unit knows none.
    """
    codes = torch.tensor([c for c in range(256) if c & 127 != 127] + [0, 128], dtype=torch.uint8)
    scales = [*range(20, 240), 8, 9, 10, 11, 245, 246]
    rows = torch.stack([torch.cat((codes, torch.full((8,), s, dtype=torch.uint8))) for s in scales])
    shape = {**NANO, "dim": 256, "rope_dim": 0, "window": 1}
    case = window_case([len(rows)], [5], **shape)
    case["q"] *= 1e-30  # finite scores under every scale; one key has weight 1 whatever its score
    case["sink"] = torch.full((4,), -torch.inf)
    with limit_isa(isa):
        actual = attend(case, new_rows=rows)
    expected = formats.dequantize_window(rows)[:, None].expand(-1, 4, -1)
    assert torch.equal(actual, expected) or isa == "amx"
    torch.testing.assert_close(actual, expected, atol=2.0**-126, rtol=0)


@pytest.mark.parametrize("isa", available_isas())
def test_rows_with_subnormal_codes_among_others(window_case, isa):
    case = window_case([40], [100], **NANO)
    for rows in (case["new_rows"], case["ring"].flatten(0, 1)):
        rows[::3, :20] = (torch.arange(20) % 8 | torch.arange(20) % 2 * 128).to(torch.uint8)
    with limit_isa(isa):
        torch.testing.assert_close(attend(case), reference(case), atol=4e-6, rtol=1e-5)
        assert torch.equal(attend(case)[17:18], attend(select(case, [17])))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [NANO, {**NANO, "dim": 96, "heads": 17}, MINI])
def test_nothing_outside_its_tensors_is_touched(window_case, isa, packed, shape):
    """Every input ends where its page ends, with no page behind it; the output has guard bytes around it."""
    case = window_case([5, 1], [30, shape["window"] + 5], packed=packed, **shape)
    case["ring_slot"] = torch.tensor([1, case["ring"].shape[0] - 1]).int()
    tight = {k: at_page_end(v) if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    out = Guarded(tuple(case["q"].shape))
    with limit_isa(isa):
        assert attend(tight, out=out.tensor) is out.tensor
        out.check()
        assert torch.equal(out.tensor, attend(case))


def test_ring_offsets_beyond_32_bits(window_case):
    """A ring pool of more than 2^32 bytes, of which only the last slot is in use (the rest stays unmapped)."""
    case = window_case([3], [40], **MINI)
    slots = 2**32 // (134 * 528) + 9
    ring = torch.empty(slots, 134, 528, dtype=torch.uint8)
    ring[-1] = case["ring"][case["ring_slot"][0]]
    far = {**case, "ring": ring, "ring_slot": torch.tensor([slots - 1]).int()}
    for isa in available_isas():
        with limit_isa(isa):
            assert torch.equal(attend(far), attend(case))
    names = ("new_rows", "ring_slot", "cu_seqlens", "start_pos")
    swa_replay.store_window(**{k: far[k] for k in names}, ring=ring, floor=torch.zeros(1).long())
    assert torch.equal(ring[-1, 40:43], case["new_rows"])


def test_no_rows(window_case):
    assert attend(window_case([0, 0], [5, 0], **NANO)).shape == (0, 4, 64)
    assert attend(window_case([], [], **NANO)).shape == (0, 4, 64)


def test_registered_op(window_case):
    case = window_case([5, 4], [0, 40], **NANO)
    assert torch.equal(torch.ops.swa_replay.window_attention(*case.values()), attend(case))
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    with pytest.raises(NotImplementedError, match=r"swa_replay\.window_attention.*meta"):
        attend(meta)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda c: c["q"].double()),
        ("q", lambda c: c["q"][..., :40].contiguous()),
        ("new_rows", lambda c: formats.dequantize_window(c["new_rows"])),
        ("new_rows", lambda c: c["new_rows"][1:]),
        ("ring", lambda c: c["ring"][..., :-1].contiguous()),
        ("window", lambda c: 0),
        ("window", lambda c: 39),
        ("ring_slot", lambda c: c["ring_slot"] + 100),
        ("ring_slot", lambda c: c["ring_slot"].long()),
        ("cu_seqlens", lambda c: torch.tensor([0, 6, 5]).int()),
        ("cu_seqlens", lambda c: torch.tensor([0, 6, 10]).int()),
        ("cu_seqlens", lambda c: torch.tensor([1, 6, 9]).int()),
        ("start_pos", lambda c: torch.tensor([0, -1])),
        ("lower", lambda c: c["lower"][:1]),
        ("sink", lambda c: c["sink"][:3]),
        ("rope", lambda c: c["rope"][:, :15].contiguous()),
        ("out", lambda c: torch.empty(9, 64, 4).transpose(1, 2)),
    ],
)
def test_bad_input_is_named(window_case, name, change):
    case = window_case([5, 4], [0, 40], **NANO)
    out = torch.full((9, 4, 64), 7.0)
    changed = {"out": out, name: change(case)}
    with pytest.raises(ValueError, match=rf"^{name}.*got.*allowed"):
        attend(case, **changed)
    assert (out == 7).all()
