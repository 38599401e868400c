"""Source that TileLang generates: the programs of dspark_kernels against their ops, and faults planted in the text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cann_ops import emulate
from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.child import load_file

pytest.importorskip("tilelang", reason="TileLang is not installed: there is no generated source")
dspark_kernels = pytest.importorskip("dspark_kernels")
DSPARK_TESTS = Path(__file__).parents[1] / "packages" / "dspark_kernels" / "tests"
THREADS = 32


@pytest.fixture(scope="module")
def lower():
    from dspark_kernels.tile import lower

    return lower.lower_ascend


@pytest.fixture(scope="module")
def schedule_source(lower):
    from dspark_kernels.tile.schedule_asc import schedule_program

    return lower(schedule_program(16, 3, 40, 24))


def schedule(ready, seed, budget, limits=None):
    """The program's results and the op's: 16 requests of up to 3 drafts, room for 40 rows, tables of 24."""
    g = torch.Generator().manual_seed(seed)
    confidence = (torch.rand(24, 3, generator=g) * 4).round() / 4
    confidence[torch.rand(24, 3, generator=g) < 0.1] = torch.nan
    if limits is None:
        limits = torch.randint(-1, 5, (16,), generator=g, dtype=torch.int32)
    slots = torch.randperm(24, generator=g)[:16].int()
    slots[torch.rand(16, generator=g) < 0.1] = -1
    fixed = torch.where(torch.rand(16, generator=g) < 0.3, torch.randint(0, 4, (16,), generator=g), -1).int()
    tokens, starts = torch.zeros(24, 4, dtype=torch.int64), torch.zeros(24, dtype=torch.int64)
    expected = dspark_kernels.schedule(confidence, tokens, starts, limits, budget, 40, slots=slots, fixed=fixed)
    sizes = {"lengths": 16, "upto": 16, "owner": 40, "place": 40, "source": 40}
    out = {name: torch.full((n,), -77, dtype=torch.int32) for name, n in sizes.items()}
    given = {"confidence": confidence, "limits": limits, "slots": slots, "fixed": fixed,
             "budget": torch.full((8,), budget, dtype=torch.int32)}  # fmt: skip
    report = ready.run(given | out, cores=1, undefined=list(out))
    assert all(report.defined[name].all() for name in out)
    return out, expected


def same_schedule(out, expected):
    return (
        torch.equal(out["lengths"], expected.lengths)
        and torch.equal(out["upto"], expected.cu_rows[1:])
        and all(torch.equal(out[name], getattr(expected, name)) for name in ("owner", "place", "source"))
    )


@pytest.mark.parametrize("budget", [0, 1, 7, 100, -3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_schedule_is_the_ops(schedule_source, seed, budget):
    out, expected = schedule(emulate.Program(schedule_source), seed, max(budget, 0))
    assert same_schedule(out, expected)


def test_a_schedule_without_requests(schedule_source):
    out, expected = schedule(emulate.Program(schedule_source), 3, 5, torch.full((16,), -1, dtype=torch.int32))
    assert same_schedule(out, expected)
    assert not out["lengths"].any() and (out["owner"] == -1).all()


def without(source, index):
    """The text without its `index`-th wait, notification or barrier; None behind the last."""
    found = list(re.finditer(r"^ *asc_sync(?:_wait|_notify|threads)\(.*\);$", source, flags=re.MULTILINE))
    if index >= len(found):
        return None
    return source[: found[index].start()] + source[found[index].end() :], found[index][0].strip()


@pytest.mark.slow
def test_every_wait_notification_and_barrier_of_the_schedule_counts(schedule_source):
    """Removed one at a time. A thread barrier is not needed where only one thread touches the bytes on both sides."""
    found, passed, index = 0, [], 0
    while (changed := without(schedule_source, index)) is not None:
        text, what = changed
        try:
            out, expected = schedule(emulate.Program(text), 0, 7)
            assert same_schedule(out, expected)
            passed.append(what)
        except emulate.EmulationError:
            found += 1
        index += 1
    assert found >= 10, (found, passed)
    assert set(passed) <= {"asc_syncthreads();"}, passed


@pytest.mark.parametrize(
    ("pattern", "replacement", "kind"),
    [
        # a copy that reads past its tensor, one that writes past it, and one past the unified buffer
        (r"(&\(limits\[0\]\)\)\), 1, )64", r"\g<1>96", emulate.BoundsError),
        (r"(asc_copy_ub2gm_align\(.*&\(upto\[)0", r"\g<1>8", emulate.BoundsError),
        (r"(asc_copy_gm2ub_align\(.*shmem\)\[)\d+(\].*slots)", r"\g<1>60000\g<2>", emulate.BoundsError),
        # a wrong offset within the buffer: its reader finds bytes that nothing wrote
        (r"(asc_copy_gm2ub_align\(.*shmem\)\[)\d+(\].*slots)", r"\g<1>1600\g<2>", emulate.UndefinedError),
        # and one that is not on a block
        (r"(asc_copy_gm2ub_align\(.*shmem\)\[)\d+(\].*slots)", r"\g<1>1601\g<2>", emulate.AlignmentError),
        # a thread too far
        (r"dim3\(16\), buf_dyn_shmem, confidence", "dim3(17), buf_dyn_shmem, confidence", emulate.EmulationError),
    ],
)
def test_a_planted_offset_or_length_is_found(schedule_source, pattern, replacement, kind):
    text, count = re.subn(pattern, replacement, schedule_source, count=1)
    assert count == 1
    with pytest.raises(kind):
        schedule(emulate.Program(text), 0, 7)


BLOCKS = 20


@pytest.fixture(scope="module")
def store_rows():
    from cann_ops import lowering
    from cann_ops.kernels import Kernel

    return lowering.lower(Kernel.of("store_rows", code_bytes=64, scale_bytes=4, rows_per_block=128))


def stored(program, lowered, n):
    """Are the pages right after n rows of 68 bytes went to slots in any order? Some slots are none."""
    g = torch.Generator().manual_seed(n)
    rows = torch.randint(0, 256, (n, 68), generator=g, dtype=torch.uint8)
    slots = torch.randperm(BLOCKS * 128, generator=g)[:n].int()
    slots[::7] = torch.tensor([-1, BLOCKS * 128, -9]).repeat(n)[: len(slots[::7])].int()
    pages = torch.full((BLOCKS, 128 * 68), 0xAA, dtype=torch.uint8)
    expected = pages.clone()
    kept = (slots >= 0) & (slots < BLOCKS * 128)
    page, place = slots[kept].long() // 128, slots[kept].long() % 128
    expected[:, : 128 * 64].view(BLOCKS, 128, 64)[page, place] = rows[kept, :64]
    expected[:, 128 * 64 :].view(BLOCKS, 128, 4)[page, place] = rows[kept, 64:]
    given = {"rows": rows, "slots": slots, "pages": pages, "n": n, "blocks": BLOCKS}
    program.run(given, cores=lowered.grid, ub_bytes=lowered.unified_bytes)
    return torch.equal(pages, expected)


@pytest.mark.parametrize("n", [0, 1, 32, 2100])
def test_stored_rows(store_rows, n):
    assert stored(emulate.Program(store_rows.source), store_rows, n)


def test_stored_rows_without_each_flag(store_rows):
    """A flag taken away as a whole, all its notifications and waits, leaves nothing unpaired: only clocks show it.

    With 2,100 rows the first two cores use their buffers twice.
    """
    pattern = re.compile(r"^ *asc_sync_(?:notify|wait)\((\w+), (\w+), static_cast<event_t>\(.*\)\);$", re.MULTILINE)
    pairs = sorted({found.groups() for found in pattern.finditer(store_rows.source)})
    assert len(pairs) == 4, pairs
    for pair in pairs:
        text = pattern.sub(lambda found, pair=pair: "" if found.groups() == pair else found[0], store_rows.source)
        with pytest.raises(emulate.RaceError):
            stored(emulate.Program(text), store_rows, 2100)


def cuts(lower, logits, temperature, top_p, top_k):
    from dspark_kernels.tile import cut_asc, run_filtered

    N, V = logits.shape
    factor, top_p, top_k = run_filtered.row_settings(temperature, top_p, top_k)
    out = {name: torch.full((N, 8), 7.0) for name in ("value", "row_top", "row_mass")}
    out["last"] = torch.full((N, 8), -7, dtype=torch.int32)
    given = {"logits": logits, "factor": factor, "top_p": top_p, "top_k": top_k}
    program = emulate.Program(lower(cut_asc.cut_program(N, V, THREADS)))
    report = program.run(given | out, cores=cut_asc.CORES, undefined=list(out))
    for name in out:  # the first of eight numbers counts, and it is written
        assert report.defined[name].reshape(N, 8, 4)[:, 0].all(), name
    return out | {"factor": factor}


@pytest.mark.slow
def test_cuts_and_verification_are_the_ops(lower):
    """Filters, acceptance and the token behind, on 64 vector cores with more rows than cores."""
    from dspark_kernels import verify
    from dspark_kernels.tile import cut_asc, run_filtered, verify_asc

    R, V, G = 66, 50, 2
    make = load_file(DSPARK_TESTS / "test_verify.py").make
    (logits, drafts, record, cu, positions, temperature, top_p, top_k, seeds), _, lengths = make(R, V, G, 2, like=0.8)
    expected = verify(logits, drafts, record, cu, positions, temperature, top_p, top_k, seeds)
    owner = torch.repeat_interleave(torch.arange(R), lengths + 1)
    settings = [t[owner].contiguous() for t in (temperature, top_p, top_k)]
    rows = cuts(lower, logits, *settings)
    kept = (logits > rows["value"][:, :1]) | (
        (logits == rows["value"][:, :1]) & (torch.arange(V) <= rows["last"][:, :1])
    )
    distribution = dspark_kernels.reference.distribution(logits, *settings)
    assert_bitwise(kept, distribution > 0)
    weights = ((logits - rows["row_top"][:, :1]) * rows["factor"][:, None]).double().exp() * kept
    assert_close(weights / rows["row_mass"][:, :1].double(), distribution, atol=1e-6, rtol=1e-5)
    accept, pair = run_filtered.draws(seeds[owner], positions + 1)
    value, last = run_filtered.unpack_cut(record.cut)
    results = torch.full((R, 8), -7, dtype=torch.int32)
    program = emulate.Program(lower(verify_asc.verify_program(R, G, len(logits), V, R, THREADS)))
    given = {
        "logits": logits, "draft_logits": drafts, "drafts": record.tokens.int(), "log_q": record.logprobs,
        "draft_top": record.top, "draft_factor": record.factor, "draft_mass": record.mass.float(),
        "draft_value": value, "draft_last": last, "cu_rows": cu, "slots": torch.arange(R, dtype=torch.int32),
        "u": torch.cat([accept[:, None], pair], 1), "results": results, **rows,
    }  # fmt: skip
    names = {p.name for kernel in program.kernels.values() for p in kernel.parameters}
    program.run({k: v for k, v in given.items() if k in names}, cores=cut_asc.CORES, undefined=["results"])
    assert_bitwise(results[:, 0].contiguous(), expected.accepted)
    assert_bitwise(results[:, 1].long(), expected.last)
