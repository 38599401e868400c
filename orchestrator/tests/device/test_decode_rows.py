"""Batches made on the device: the same as those made on the host, and nothing is read back on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import dspark_kernels
from kernel_core import using
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.decode_rows import decode_rows
from orchestrator.engine.draft_graphs import DraftGraphs
from orchestrator.engine.engine import Engine
from orchestrator.engine.launch import InOrder
from orchestrator.engine.request import SamplingParams, TokenOutput
from orchestrator.engine.sequence import Sequence
from orchestrator.engine.slot_table import SlotTable
from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.transfer import tensors_of

RATIOS = (1, 2)
DEPTH = 5


def sequences(count: int, seed: int) -> list[Sequence]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        length = rng.choice([1, 2, 3, 4, 60, 126, 127, 128, 129, 255, 257])
        one = Sequence(str(i), SamplingParams(), [rng.randrange(500) for _ in range(length)], length, 999, i, 0)
        one.slot, one.blocks = count - i, [1 + 4 * i + k for k in range(1 + (length + DEPTH) // 128)]
        one.decoder_lower = max(0, length - 44)
        one.drafts = [rng.randrange(500) for _ in range(DEPTH)]
        one.confidence = [rng.random() for _ in range(DEPTH)]
        made.append(one)
    return made


def there(values: torch.Tensor) -> torch.Tensor:
    return values


def device_batch(mine: list[Sequence], limits: list[int], total: int, spare: int, exact: bool):
    table = SlotTable(len(mine) + 1, DEPTH, torch.device("cpu"))
    table.load(mine, there)
    slots = torch.tensor([s.slot for s in mine], dtype=torch.int32)
    schedule = dspark_kernels.schedule(
        table.confidence, table.tokens, table.starts, torch.tensor(limits, dtype=torch.int32), total,
        len(mine) + total + spare, slots=slots,
    )  # fmt: skip
    width = max(len(s.blocks) for s in mine)
    blocks = torch.tensor([s.blocks + [0] * (width - len(s.blocks)) for s in mine], dtype=torch.int32)
    lower = torch.tensor([s.decoder_lower for s in mine])
    batch = decode_rows(table, schedule, slots.long(), lower, blocks, RATIOS, longest=6, highest=999, exact=exact)
    return schedule, batch


@pytest.mark.parametrize("seed", range(12))
def test_the_device_makes_the_batch_of_the_host(seed):
    rng = random.Random(100 + seed)
    mine = sequences(rng.randrange(1, 9), seed)
    limits = [rng.randrange(DEPTH + 1) for _ in mine]
    schedule, batch = device_batch(mine, limits, rng.randrange(sum(limits) + 1), 0, True)
    chunks = []
    for one, length in zip(mine, schedule.lengths.tolist(), strict=True):
        start = len(one.tokens) - 1
        chunks.append(
            Chunk(one.tokens[-1:] + one.drafts[:length], start, one.slot, one.blocks, one.tokens[:-1][-3:],
                  decoder_lower=one.decoder_lower, logits="all")
        )  # fmt: skip
    expected = StepBatch.build(chunks, RATIOS)
    marked = batch.decoder.padding
    assert marked is not None and marked.tolist() == [False] * batch.decoder.count
    encoder, decoder = (replace(half, padding=None) for half in (batch.encoder, batch.decoder))
    plain = replace(batch, encoder=encoder, decoder=decoder)
    for got, wanted in zip(tensors_of(plain), tensors_of(expected), strict=True):
        assert got.equal(wanted) and got.dtype == wanted.dtype, (got, wanted)


@pytest.mark.parametrize("seed", range(6))
def test_fixed_sizes_hold_the_same_rows_and_padding(seed):
    mine = sequences(4, seed)
    _, exact = device_batch(mine, [3, 0, 5, 2], 7, 0, True)
    _, padded = device_batch(mine, [3, 0, 5, 2], 7, 4, False)
    rows, spare = 11, 4
    assert padded.tokens.tolist() == exact.tokens.tolist() + [0] * spare
    assert padded.decoder.padding is not None and padded.decoder.padding.tolist() == [False] * rows + [True] * spare
    ends = padded.encoder.cu_seqlens.tolist()
    assert ends[:5] == exact.encoder.cu_seqlens.tolist() and ends[5:9] == [12, 13, 14, 15] and set(ends[9:]) == {15}
    assert padded.slots.tolist()[4:] == [0] * (len(ends) - 5)
    for ratio in RATIOS:
        written = padded.global_slots[ratio][padded.global_slots[ratio] >= 0]
        assert written.equal(exact.global_slots[ratio])
        assert padded.encoder.visible[ratio][rows:].tolist() == [0] * spare


@torch.inference_mode()
def test_a_request_at_its_last_place_stands_still():
    mine = sequences(3, 3)
    table = SlotTable(4, DEPTH, torch.device("cpu"))
    table.load(mine, there)
    slots = torch.tensor([s.slot for s in mine])
    starts = torch.tensor([len(s.tokens) - 1 for s in mine])
    result = dspark_kernels.new_verified(3, DEPTH, torch.device("cpu"))
    result.tokens.copy_(torch.arange(18).view(3, 6) + 600)
    result.counts.copy_(torch.tensor([6, 1, 4]))
    table.commit(slots, result, starts + torch.tensor([9, 0, 2]))
    assert (table.starts[slots] - starts).tolist() == [6, 0, 2]
    assert table.tokens[slots, 0].tolist() == [605, mine[1].tokens[-1], 613]
    assert table.history[slots[0]].tolist() == [604, 603, 602]
    assert table.history[slots[2]].tolist() == [612, *[*mine[2].tokens[::-1], -1, -1][:2]]


def run(engine) -> dict[str, list[int]]:
    """Two requests, the first of which ends early; few tokens, as PyTorch's operators are slow for this model."""
    for i in range(2):
        params = SamplingParams(temperature=i, seed=i, max_tokens=3 + 2 * i, ignore_eos=True)
        engine.add(f"{i}", [(7 * i + j) % 500 for j in range(3 + i)], params)
    tokens: dict[str, list[int]] = {f"{i}": [] for i in range(2)}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                tokens[event.request_id].append(event.token_id)
    return tokens


@pytest.fixture(scope="module")
def expected(nano) -> dict[str, list[int]]:
    with using("library"):
        return run(Engine(nano, None, EngineConfig(num_blocks=8, max_num_seqs=2, speculation="off")))


def test_an_overlapped_step_never_waits_for_the_device(nano, expected, watch, monkeypatch):
    """With sizes fixed as on a GPU: no operator of F or S reads a value back, and the tokens are the same."""
    monkeypatch.setattr("orchestrator.engine.decode_rows._exact_on", lambda device: False)
    with using("library"):
        engine = Engine(nano, None, EngineConfig(num_blocks=8, max_num_seqs=2, speculation=2))
        engine.overlap(InOrder())
        pipeline, seen = engine.pipeline, []
        for name in ("_forward", "_sample"):
            original = getattr(pipeline, name)

            def watched(*args, original=original):
                with watch() as reads:
                    original(*args)
                seen.append(reads)

            monkeypatch.setattr(pipeline, name, watched)
        assert run(engine) == expected
    assert len(seen) >= 4 and all(reads.count > 20 for reads in seen)
    # What dspark_kernels looks at in tensors on the host, its checks of arguments, it leaves out on a GPU.
    found = set().union(*(reads.found for reads in seen))
    assert {where for where in found if "dspark_kernels" not in where} == set()


class FakeGraph:
    """Runs the recorded function again, on the same tensors, and writes into the same result."""

    made = 0

    def capture(self, function):
        FakeGraph.made += 1
        self._function, self._result = function, function()
        return self._result

    def replay(self):
        self._result.copy_(self._function())


@pytest.mark.parametrize("speculation", ["off", 2])
def test_forward_passes_from_graphs_give_the_same_tokens(nano, expected, speculation):
    """Requests come and go, so that sizes, tables and padding differ; padding writes no global row."""
    with using("library"):
        engine = Engine(nano, None, EngineConfig(num_blocks=8, max_num_seqs=3, speculation=speculation))
        engine.overlap(InOrder())
        FakeGraph.made = 0
        engine.pipeline.graphs = engine.pipeline.new_graphs(FakeGraph)
        if engine.speculator is not None:
            engine.pipeline.draft_graphs = DraftGraphs(engine.pipeline.drafting, 3, FakeGraph)
        assert run(engine) == expected
    assert engine.speculator is None or not engine.pipeline.draft_graphs.failed
    assert 2 <= FakeGraph.made <= 12 and not engine.pipeline.graphs.failed
    assert not any(p.main[0].any() or p.index[0].any() for p in engine.cache.pools.values())


def test_a_failed_recording_is_said_once_and_falls_back(nano, expected, caplog):
    class Broken(FakeGraph):
        def capture(self, function):
            raise RuntimeError("operation not permitted")

    with using("library"):
        engine = Engine(nano, None, EngineConfig(num_blocks=8, max_num_seqs=2, speculation=2))
        engine.overlap(InOrder())
        engine.pipeline.graphs = engine.pipeline.new_graphs(Broken)
        engine.pipeline.draft_graphs = DraftGraphs(engine.pipeline.drafting, 2, Broken)
        assert run(engine) == expected
    assert engine.pipeline.graphs.failed and engine.pipeline.draft_graphs.failed
    assert len([r for r in caplog.records if "not permitted" in r.message and "without graphs" in r.message]) == 2
