"""Dense products on a GPU: the error, and that a row's bits are its own."""

import pytest
import torch

from kernel_core import formats
from kernel_core.testing import assert_bitwise
from orchestrator.model.dense import dense, grouped
from orchestrator.model.weights import Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROWS = (0, 1, 5, 63, 64, 65, 130)


@pytest.fixture(scope="module")
def weight():
    torch.manual_seed(3)
    return Linear(*(t.cuda() for t in formats.quantize_fp8_block(torch.randn(384, 256) / 16)))


def exact(x, weight):
    return x.double() @ formats.dequantize_fp8_block(weight.weight, weight.scale).double().T


@pytest.mark.parametrize("rows", ROWS)
def test_fixed_has_the_error_of_float32(weight, rows):
    x = torch.randn(rows, 256, device="cuda")
    got = dense(weight, "fixed")(x)
    assert got.shape == (rows, 384) and got.dtype is torch.float32
    if rows:
        assert (got.double() - exact(x, weight)).abs().max() < 2e-5


@pytest.mark.parametrize("rows", [1, 64, 130])
def test_library_rounds_activations_once(weight, rows):
    x = torch.randn(rows, 256, device="cuda")
    got = dense(weight, "library")(x)
    assert (got.double() - exact(x.bfloat16().float(), weight)).abs().max() < 2e-5


def test_a_row_of_fixed_depends_on_itself(weight):
    x = torch.randn(200, 256, device="cuda")
    run = dense(weight, "fixed")
    whole = run(x)
    for first, last in ((0, 1), (63, 64), (64, 65), (130, 133), (199, 200)):
        assert_bitwise(run(x[first:last].contiguous()), whole[first:last])
    x[7] = torch.nan
    x[9, 3] = torch.inf
    again = run(x)
    assert again[7].isnan().all()
    keep = [i for i in range(200) if i not in (7, 9)]
    assert_bitwise(again[keep], whole[keep])


@pytest.mark.parametrize("mode", ["fixed", "library"])
@pytest.mark.parametrize("rows", ROWS)
def test_grouped_is_one_product_a_group(weight, mode, rows):
    x = torch.randn(rows, 4, 256, device="cuda")
    got = grouped(weight, 4, mode)(x)
    assert got.shape == (rows, 4, 96) and got.is_contiguous()
    full = formats.dequantize_fp8_block(weight.weight, weight.scale).double().view(4, 96, 256)
    seen = x if mode == "fixed" else x.bfloat16()
    if rows:
        assert (got.double() - torch.einsum("tgi,goi->tgo", seen.double(), full)).abs().max() < 2e-5


def test_in_a_graph(weight):
    x = torch.randn(70, 256, device="cuda")
    run = dense(weight, "fixed")
    wanted = run(x)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(x)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = run(x)
    graph.replay()
    assert_bitwise(out, wanted)
