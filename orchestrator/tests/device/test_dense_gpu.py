"""What precedes and follows the products of a GPU, on the CPU: terms and blocks of rows."""

import pytest
import torch

from orchestrator.model import dense_gpu


def test_terms_add_up_to_the_value():
    x = torch.randn(1000) * torch.exp2(torch.randint(-60, 60, (1000,)))
    high, middle, low = dense_gpu._terms(x.view(1, -1)).float()[0]
    assert torch.equal((low.double() + middle + high).float(), x)
    odd = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    high, middle, low = dense_gpu._terms(odd.view(1, -1)).float()[0]
    assert torch.equal(high[:3], odd[:3]) and high[3].isnan() and not middle[:3].any() and not low[:3].any()


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_blocks_have_one_size_and_rows_keep_their_place(count):
    seen = []

    def run(rows):
        seen.append(rows.shape)
        return rows.float() * 2

    x = torch.randn(count, 3, 8)
    got = dense_gpu._in_blocks(x, run)
    assert torch.equal(got, 2 * x) and got.is_contiguous()
    assert set(seen) == ({(192, 3, 8)} if count else {(0, 3, 8)})
