"""One rank against the reference, and the reference against plain arithmetic."""

from __future__ import annotations

import pytest
import torch

import ep_comm
from ep_comm import Shape, reference
from ep_comm.rows import decode_rows, encode_rows


def _inputs(shape: Shape, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=g)
    ids = torch.randint(-1, shape.physical_experts, (tokens, shape.top_k), generator=g, dtype=torch.int32)
    return x, ids, torch.rand(tokens, shape.top_k, generator=g)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dispatch", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_local_is_the_reference(dispatch, fixed, tokens):
    shape = Shape(1, 9, 128, 3, 5, dispatch=dispatch, combine="bfloat16")
    x, ids, weights = _inputs(shape, tokens, 1)
    comm = ep_comm.local(shape)
    got = comm.dispatch(x, ids, weights, fixed=fixed)
    rows = got.sources >= 0
    assert int(rows.sum()) == int((ids >= 0).any(1).sum()) == int(got.counts[0])
    y = torch.full((*got.ids.shape, shape.hidden), float("nan"))
    y[got.ids >= 0] = decode_rows(got.x, got.scales)[:, None].expand_as(y)[got.ids >= 0]
    out = comm.combine(y, got)
    assert torch.equal(out, reference.combine(shape, [y], [got], [ids])[0])
    assert not out.isnan().any()  # rows of empty slots were not read


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_slots_give_the_bits_of_one_rank(ranks):
    one, many = Shape(1, 40, 32, 4, ranks * 3), Shape(ranks, 12, 32, 4, 3)
    parts = [_inputs(many, 1 + rank % 5, rank) for rank in range(ranks)]
    xs, ids, weights = (list(column) for column in zip(*parts, strict=True))
    outs = []
    for shape, x, i, w in ((one, [torch.cat(xs)], [torch.cat(ids)], [torch.cat(weights)]), (many, xs, ids, weights)):
        received = reference.dispatch(shape, x, i, w)
        ys = []
        for rank, d in enumerate(received):
            expert = (d.ids + rank * shape.experts + 1).float()  # an "expert": its number times the weighted token
            ys.append(d.x[:, None] * (expert * d.weights)[..., None])
        outs.append(torch.cat(reference.combine(shape, ys, received, i)))
    assert torch.equal(outs[0], outs[1])


def test_fp8_by_its_definition():
    shape = Shape(1, 8, 256, 1, 1, dispatch="fp8")
    x = torch.zeros(2, 256)
    x[0, 0], x[0, 1], x[0, 128] = 896.0, float("nan"), 1e-45
    x[1, 3] = float("inf")
    codes, scales = encode_rows(x, shape)
    assert scales is not None
    assert scales.tolist() == [[2.0, 1.0], [float("inf"), 1.0]]
    back = decode_rows(codes, scales)
    assert back[0, 0] == 896 and back[0, 1].isnan() and (back[0, 2:] == 0).all()
    assert back[1, :128].isnan().all() and (back[1, 128:] == 0).all()


@pytest.mark.parametrize("name", ["x", "ids", "weights"])
def test_bad_input_leaves_the_epoch_unused(name):
    shape = Shape(1, 4, 32, 2, 3)
    comm = ep_comm.local(shape)
    good = dict(zip(("x", "ids", "weights"), _inputs(shape, 4, 0), strict=True))
    bad = {**good, name: torch.full((4, 2), 3, dtype=torch.int32) if name == "ids" else good[name].double()}
    with pytest.raises(ValueError, match=name):
        comm.dispatch(**bad)
    assert comm.epoch == 0
    assert comm.dispatch(**good).epoch == 1


def test_combine_takes_the_latest_dispatch_only_and_nothing_after_close():
    shape = Shape(1, 4, 32, 2, 3)
    comm = ep_comm.local(shape)
    first = comm.dispatch(*_inputs(shape, 4, 0))
    comm.dispatch(*_inputs(shape, 4, 1))
    with pytest.raises(ValueError, match="dispatched"):
        comm.combine(torch.zeros(first.ids.shape[0], 32), first)
    comm.close()
    with pytest.raises(ep_comm.Broken, match="closed"):
        comm.barrier()
