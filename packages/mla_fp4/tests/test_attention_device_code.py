"""Sparse attention's own device code, thread by thread on the host: who waits for whom, where what stands, the bits."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.host import address, host_library

HERE = Path(__file__).parent
SOURCES = HERE.parent / "csrc"
WINDOW, ROWS_PER_BLOCK = 128, 16
SECONDS = 30  # for a CTA; far above what it takes
NAMES = ("q", "new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos", "lower")
NAMES += ("pages", "block_table", "indices", "sink", "rope")


def operands(text):
    """The expressions of `"constraint"(expression), ...`."""
    found = []
    for start in re.finditer(r'"[=+&]*[a-z]+"\s*\(', text):
        depth, end = 1, start.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found.append(text[start.end() : end - 1])
    return found


def call(match):
    """A statement of inline assembly as a call of the function that stands for its instruction."""
    statements = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', match[1])).replace("\\n", ";")
    names = [name for name in re.findall(r"(?:^|[;{]|@p)\s*([a-z][\w.:]*)", statements)]
    names = [name for name in names if not name.startswith(("setp", "selp"))]
    if not names:
        return ";"
    name = names[0] if len(names) == 1 else next(n for n in names if not n.startswith("mov"))
    return f"ptx_{re.sub('[.:]+', '_', name)}({', '.join(operands(match[2]))});"


def host_text(source):
    """Device code that a host compiler takes: no inline assembly, and of a kernel's file what precedes its launch."""
    text = source.read_text()
    text = re.sub(r'asm volatile\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)(.*?)\);', call, text, flags=re.DOTALL)
    text = re.sub(r"#pragma unroll.*|#include <cuda_bf16.h>", "", text)
    if source.suffix == ".cu":
        kernel = text.index("__global__")
        name = f"{source.stem.removeprefix('attention_')}_kernel"
        text = text[: text.index("\n}\n", kernel) + 3] + f"\n}}  // namespace {name}\n}}  // namespace mla_fp4::cuda\n"
        text = text.replace("namespace {\n", f"namespace {name} {{\n", 1)
        text = re.sub(r"extern __shared__ .*? memory\[\];", "const void* memory = nullptr;", text)
    return text


def build_library(sources, folder):
    sm90 = folder / "cuda/sm90"
    sm90.mkdir(parents=True)
    for source in (sources / "cuda/sm90").glob("attention_*"):
        target = folder / f"{source.stem}.inc" if source.suffix == ".cu" else sm90 / source.name
        target.write_text(host_text(source))
    library = host_library(HERE / "host/attention_threads.cpp", folder, folder, sources, HERE / "host/stub")
    numbers = [ctypes.c_float, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_double]
    library.attend.argtypes, library.attend.restype = [ctypes.c_void_p] * 2 + numbers, ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    return build_library(SOURCES, tmp_path_factory.mktemp("attention_device"))


def build(lengths, starts, *, selected=200, holes=0.2, heads=64, lower=None, seed=0):
    """A ragged batch; what no key reads is NaN: block 0, rows that no index names, ring rows outside of the windows."""
    g = torch.Generator().manual_seed(seed)
    rows, batch, visible = sum(lengths), len(lengths), max(selected, 40)
    lower = lower or [0] * batch

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    used = -(-visible // ROWS_PER_BLOCK)
    blocks = used * batch + 1
    table = torch.full((batch, used + 1), 2**31 - 1, dtype=torch.int32)
    table[:, :used] = (torch.randperm(blocks - 1, generator=g) + 1).int().view(batch, used)
    indices = torch.stack([torch.randperm(visible, generator=g)[:selected] for _ in range(rows)]).int()
    indices[torch.rand(rows, selected, generator=g) < holes] = -1
    slots = torch.randperm(batch + 1, generator=g)[:batch].int()
    pages = formats.quantize_main(normal(blocks, ROWS_PER_BLOCK, 512))
    ring = formats.quantize_window(normal(batch + 1, WINDOW + 2, 512))
    kept = torch.zeros(pages.shape[:2], dtype=torch.bool), torch.zeros(ring.shape[:2], dtype=torch.bool)
    for b, first in enumerate(torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()):
        named = indices[first : first + lengths[b]].unique().long()
        named = named[named >= 0]
        kept[0][table[b, named // ROWS_PER_BLOCK].long(), named % ROWS_PER_BLOCK] = True
        for key in range(max(lower[b], starts[b] - WINDOW + 1, 0), starts[b]):
            kept[1][slots[b], key % ring.shape[1]] = True
    pages[~kept[0]], ring[~kept[1]] = 255, 255
    return {
        "q": normal(rows, heads, 512).bfloat16(),
        "new_rows": formats.quantize_window(normal(rows, 512)),
        "ring": ring,
        "ring_slot": slots,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "start_pos": torch.tensor(starts, dtype=torch.int64),
        "lower": torch.tensor(lower, dtype=torch.int64),
        "pages": pages,
        "block_table": table,
        "indices": indices,
        "sink": normal(heads),
        "rope": normal(rows, 64),
    }


def attend(lib, case, group, *, ctas=1, seed=0):
    rows, heads, _ = case["q"].shape
    guarded = torch.full((rows + 2, heads, 512), 77.0, dtype=torch.bfloat16)
    out = guarded[1:-1]
    out[:] = torch.nan
    assert all(case[name].is_contiguous() for name in NAMES) and ctas * group <= rows * heads + group - 1
    pointers = torch.tensor([case[name].data_ptr() for name in NAMES] + [out.data_ptr()])
    numbers = (rows, heads, len(case["lower"]), *case["ring"].shape[:2], WINDOW, *case["pages"].shape[:2])
    sizes = torch.tensor([*numbers, case["block_table"].shape[1], case["indices"].shape[1]])
    error = lib.attend(address(pointers), address(sizes), 512**-0.5, group, ctas, seed, SECONDS)
    assert error == b"", error.decode()
    assert (guarded[0] == 77).all() and (guarded[-1] == 77).all()
    return out.clone()


def check(actual, case):
    with using("reference"):
        expected = mla_fp4.sparse_attention(
            **{**case, "q": case["q"].float()}, window=WINDOW, rows_per_block=ROWS_PER_BLOCK, scale=512**-0.5
        )
    assert_close(actual.float(), expected, atol=6e-3, rtol=2.01 / 128, max_diff=5e-6)


def alone(case, row):
    """One row of the batch as a batch of one; for requests of one row."""
    one = {**case, **{name: case[name][row : row + 1] for name in ("q", "new_rows", "indices", "rope")}}
    one |= {name: case[name][row : row + 1] for name in ("start_pos", "lower", "ring_slot", "block_table")}
    return {name: tensor.clone() for name, tensor in {**one, "cu_seqlens": torch.tensor([0, 1]).int()}.items()}


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(("selected", "holes"), [(0, 0.0), (70, 0.2), (200, 0.3)])
def test_one_row(lib, selected, holes, seed):
    case = build([1], [150], selected=selected, holes=holes)
    wide = attend(lib, case, 64, seed=seed)
    check(wide, case)
    assert_bitwise(attend(lib, case, 8, ctas=2, seed=seed + 1), wide, name="8 heads a CTA")
    assert_bitwise(attend(lib, case, 16, seed=seed + 1), wide, name="16 heads a CTA")


@pytest.mark.parametrize("group", [16, 64])
def test_keys_of_the_ring_and_of_this_step(lib, group):
    """Rows of one request at the start, after a turn of the ring, above a lower bound; an odd number of tiles."""
    case = build([2, 1], [3, 700], selected=70, lower=[0, 650])
    whole = attend(lib, case, group)
    check(whole, case)
    assert_bitwise(attend(lib, case, group, ctas=2, seed=2), whole)


@pytest.mark.parametrize("group", [8, 64])
def test_a_row_depends_on_itself(lib, group):
    """Rows in turn by one CTA, each by a CTA, each alone."""
    case = build([1, 1], [40, 500], selected=70, lower=[10, 0])
    whole = attend(lib, case, group, seed=1)
    check(whole, case)
    assert_bitwise(attend(lib, case, group, ctas=2 * 64 // group, seed=2), whole)
    for row in range(2):
        assert_bitwise(attend(lib, alone(case, row), group, seed=row), whole[row : row + 1], name=f"row {row}")


@pytest.mark.parametrize("seed", range(4, 12))
def test_no_bit_depends_on_who_goes_first(lib, seed):
    case = build([2], [100], selected=200)
    assert_bitwise(attend(lib, case, 64, seed=seed), attend(lib, case, 64))
    few = {**case, "q": case["q"][:, :16].contiguous(), "sink": case["sink"][:16].contiguous()}
    assert_bitwise(attend(lib, few, 16, seed=seed), attend(lib, few, 16))


def test_heads_that_do_not_fill_a_group(lib):
    case = build([1], [9], selected=70, heads=19)
    whole = attend(lib, case, 32)
    check(whole, case)
    assert_bitwise(attend(lib, case, 8), whole)


@pytest.mark.parametrize("group", [16, 64])
def test_no_key(lib, group):
    case = build([1], [0], selected=3, holes=1.0, lower=[9])
    assert (attend(lib, case, group) == 0).all()


@pytest.mark.parametrize("group", [16, 64])
def test_a_nan_row_shows(lib, group):
    case = build([1], [150], selected=70, holes=0.0)
    index = case["indices"][0, 69]
    case["pages"][case["block_table"][0, index // ROWS_PER_BLOCK], index % ROWS_PER_BLOCK] = 255
    assert attend(lib, case, group).isnan().any(-1).all()
