"""Decode steps on static buffers, with a graph that remembers the function instead of the GPU's work."""

from __future__ import annotations

import logging

import pytest
import torch

from kernel_core import using
from orchestrator.engine.decode_batch import Shape, decode_shape, empty_batch, padded_batch, same_layout
from orchestrator.engine.graphs import DecodeGraphs
from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.transfer import packed, tensors_of, to_device, views_of


class FakeGraph:
    """Runs the recorded function again, on the same tensors, and writes into the same result."""

    made = 0

    def __init__(self) -> None:
        FakeGraph.made += 1

    def capture(self, function):
        self._function, self._result = function, function()
        return self._result

    def replay(self):
        self._result.copy_(self._function())


def chunk(**changes) -> Chunk:
    return Chunk(**({"tokens": [3], "start": 9, "slot": 1, "blocks": [1]} | changes))


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (16, 16), (17, 32)])
def test_sizes_are_powers_of_two(count, size):
    assert decode_shape([chunk()] * count, 64, 4096) == Shape(size, 4)


@pytest.mark.parametrize(("blocks", "width"), [(1, 4), (4, 4), (5, 16), (17, 64), (65, 100), (100, 100)])
def test_tables_widen_in_steps_up_to_the_context(blocks, width):
    assert decode_shape([chunk(), chunk(blocks=[1] * blocks)], 4, 12_800).width == width


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [chunk()] * 5,
        [chunk(), chunk(tokens=[1, 2])],
        [chunk(decoder_lower=10)],
        [chunk(logits="none")],
        [chunk(is_image=[False])],
    ],
)
def test_other_steps_run_eagerly(chunks):
    assert decode_shape(chunks, 4, 4096) is None


def test_padding_rows_see_and_write_nothing():
    chunks = [chunk(start=9, blocks=[5], history=[1, 2, 8]), chunk(start=130, slot=2, blocks=[6, 7])]
    batch = padded_batch(chunks, Shape(4, 4), (1, 2))
    assert batch.tokens.tolist() == [3, 3, 0, 0] and batch.slots.tolist() == [1, 2, 0, 0]
    assert batch.block_table.tolist() == [[5, 0, 0, 0], [6, 7, 0, 0], [0] * 4, [0] * 4]
    assert batch.history.tolist() == [[8, 2, 1], [-1] * 3, [-1] * 3, [-1] * 3]
    for rows in (batch.encoder, batch.decoder):
        assert rows.cu_seqlens.tolist() == [0, 1, 2, 3, 4] and rows.longest == 1
        assert rows.start_pos.tolist() == [9, 130, 0, 0]
        assert rows.visible[1].tolist() == [10, 131, 0, 0] and rows.visible[2].tolist() == [5, 65, 0, 0]
    assert batch.global_slots[1].tolist() == [5 * 128 + 9, 7 * 128 + 2, -1, -1]
    assert batch.global_slots[2].tolist() == [5 * 64 + 4, -1, -1, -1]  # position 130 opens a group
    assert batch.group_positions[2].tolist() == [8, 0, 0, 0]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3] and batch.kept is None
    empty = empty_batch(Shape(4, 4), (1, 2))
    assert same_layout(tensors_of(batch), tensors_of(empty))
    assert not same_layout(tensors_of(batch), tensors_of(empty_batch(Shape(4, 16), (1, 2))))
    assert all((slots == -1).all() for slots in empty.global_slots.values())
    assert all((seen == 0).all() for seen in empty.encoder.visible.values())


@pytest.mark.parametrize("kept", [False, True])
def test_a_batch_survives_packing(kept):
    chunks = [
        chunk(tokens=[4, 5, 6], start=0, is_image=[True, False, False]),
        chunk(start=300, blocks=[2, 3, 4], decoder_lower=300 + kept),
    ]
    batch = StepBatch.build(chunks, (1, 2))
    assert (batch.kept is not None) == kept
    tensors = tensors_of(batch)
    moved = views_of(batch, packed(tensors, torch.device("cpu")))
    for before, after in zip(tensors, tensors_of(moved), strict=True):
        assert before.dtype == after.dtype and before.equal(after) and after.data_ptr() % 16 == 0
    assert moved.encoder.visible[1] is moved.decoder.visible[1] or kept
    assert to_device(batch, torch.device("cpu")) is batch


def steps(model, batch, run, count):
    return torch.stack([run(batch.next_chunks()).clone() for _ in range(count)])


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [[7], [4, 30, 126], [125, 3, 9, 60, 2]])
def test_replayed_steps_equal_eager_ones(nano, requests, lengths):
    """The same bits as eager steps of the padded batch, in logits and caches. Requests grow over a block's end."""

    def padded(chunks):
        step = padded_batch(chunks, decode_shape(chunks, 8, 300), nano.ratios)
        return nano.forward(step, eager.cache)[: len(chunks)]

    with using("library"):
        eager, replayed = requests(nano, lengths), requests(nano, lengths)
        eager.prefill(), replayed.prefill()
        FakeGraph.made = 0
        graphs = DecodeGraphs(nano, replayed.cache, largest=8, context=300, new_graph=FakeGraph)
        assert steps(nano, replayed, graphs.run, 5).equal(steps(nano, eager, padded, 5))
    assert FakeGraph.made == 1
    for layer, pool in eager.cache.pools.items():
        other = replayed.cache.pools[layer]
        assert pool.main.equal(other.main) and pool.index.equal(other.index)
        assert not other.main[0].any() and not other.index[0].any()
    assert eager.cache.rings[:, 1:].equal(replayed.cache.rings[:, 1:])
    assert all(t[1:].equal(replayed.cache.tails[layer][1:]) for layer, t in eager.cache.tails.items())


@torch.inference_mode()
def test_padding_rows_change_nothing_but_rounding(nano, requests):
    def unpadded(chunks):
        return nano.forward(StepBatch.build(chunks, nano.ratios), eager.cache)

    lengths = [125, 3, 9, 60, 2]
    with using("library"):
        eager, replayed = (requests(nano, lengths, quantised=False) for _ in range(2))
        eager.prefill(), replayed.prefill()
        graphs = DecodeGraphs(nano, replayed.cache, largest=8, context=300, new_graph=FakeGraph)
        expected, actual = steps(nano, eager, unpadded, 5), steps(nano, replayed, graphs.run, 5)
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.inference_mode()
def test_a_shape_is_recorded_once_and_recording_changes_nothing(nano, requests):
    with using("library"):
        batch = requests(nano, [4, 9])
        batch.prefill()
        before = [pool.main.clone() for pool in batch.cache.pools.values()], batch.cache.rings[:, 1:].clone()
        graphs = DecodeGraphs(nano, batch.cache, largest=8, context=300, new_graph=FakeGraph)
        FakeGraph.made = 0
        graphs._record(Shape(2, 3))
        for pool, kept in zip(batch.cache.pools.values(), before[0], strict=True):
            assert pool.main.equal(kept)
        assert batch.cache.rings[:, 1:].equal(before[1])
        for size in (2, 2, 1, 2, 1):
            graphs.run(batch.next_chunks()[:size])
    assert FakeGraph.made == 2


@torch.inference_mode()
def test_a_failed_recording_is_said_once_and_falls_back(nano, requests, caplog):
    class Broken(FakeGraph):
        def capture(self, function):
            raise RuntimeError("operation not permitted")

    batch = requests(nano, [4])
    with caplog.at_level(logging.WARNING):
        graphs = DecodeGraphs(nano, batch.cache, largest=8, context=300, new_graph=Broken)
        assert graphs.run(batch.next_chunks()) is None and graphs.run(batch.next_chunks()) is None
    assert graphs.failed and len(caplog.records) == 1 and "not permitted" in caplog.text


def test_an_engine_on_graphs_gives_the_tokens_of_an_eager_one(nano):
    """Requests come and go, some sampled; sizes 1 to 4 come up, and chunked prompts run eagerly in between."""
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine
    from orchestrator.engine.request import Finished, SamplingParams, TokenOutput

    found = []
    for graphs in (False, True):
        with using("library"):
            engine = Engine(
                nano,
                None,
                EngineConfig(num_blocks=8, max_num_seqs=4, chunk_tokens=8, max_step_tokens=8, speculation="off"),
            )
            if graphs:
                FakeGraph.made = 0
                options = {"largest": 4, "context": engine.context, "new_graph": FakeGraph}
                engine.runner.graphs = DecodeGraphs(nano, engine.cache, **options)
            for i in range(5):
                params = SamplingParams(temperature=i % 2 * 0.7, seed=i, max_tokens=4 + 2 * i, ignore_eos=True)
                engine.add(f"{i}", [(7 * i + j) % 500 for j in range(3 + 4 * i)], params)
            tokens, ended = {f"{i}": [] for i in range(5)}, {}
            while engine.has_work:
                for event in engine.step():
                    if isinstance(event, TokenOutput):
                        tokens[event.request_id].append(event.token_id)
                    elif isinstance(event, Finished):
                        ended[event.request_id] = event.reason
        assert set(ended.values()) == {"length"}
        found.append(tokens)
    assert found[0] == found[1] and 2 <= FakeGraph.made <= 3
