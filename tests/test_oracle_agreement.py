"""The engine against the float64 oracle: arithmetic to 1e-4, and every discrete choice judged by its margin."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from oracle import Oracle

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import SamplingParams
from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.engram_tables import token_map_of
from orchestrator.model.record import Recorder, StepRecorder

OUTPUT = 6


def oracle_of(path: Path) -> Oracle:
    vocab = Oracle(path, token_map=[]).config.vocab_size
    return Oracle(path, token_map=token_map_of(path / "tokenizer.json", vocab).numpy())


@pytest.fixture(scope="session")
def nano_oracle(nano_path):
    return oracle_of(nano_path)


@pytest.fixture(scope="session")
def mini_oracle(mini_path):
    return oracle_of(mini_path)


def tokens_for(model, count: int, seed: int = 5) -> list[int]:
    return [random.Random(seed).randrange(model.config.vocab_size) for _ in range(count)]


def record_of(model, prompt: list[int], chunk: int, *, every_row: bool = False, **options):
    """A greedy run's record as numpy arrays."""
    config = EngineConfig(chunk_tokens=chunk, max_step_tokens=max(16, chunk), num_blocks=16, **options)
    engine, recorder = Engine(model, None, config), Recorder()
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, prompt_logprobs=every_row)
    engine.add("r", prompt, params, recorder=recorder)
    while engine.has_work:
        engine.step()
    return {key: rows.numpy() for key, rows in recorder.export().items()}


def judge(oracle, record, **options):
    _, report = oracle.follow(record, **options)
    assert report.passed, str(report)
    kinds = set(report.kinds)
    assert {"window code", "main code", "index code", "main scale", "topk", "experts"} <= kinds, kinds
    assert all(tally.judged > 0 for tally in report.kinds.values())
    return report


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (2, 64), (31, 7), (150, 64), (301, 133)])
def test_unquantised_logits_agree(nano, nano_oracle, length, chunk):
    prompt = tokens_for(nano, length)
    record = record_of(nano, prompt, chunk, every_row=True, quantised_caches=False)
    trace = nano_oracle.forward(record["tokens"], cache="float")
    error = abs(record["logits"] - trace.logits[record["logits/positions"]]).max()
    assert len(record["logits"]) == length + OUTPUT - 1
    assert error <= 1e-4, error


def test_unquantised_logits_agree_with_production_rows(mini, mini_oracle):
    record = record_of(mini, tokens_for(mini, 140), 64, every_row=True, quantised_caches=False)
    trace = mini_oracle.forward(record["tokens"], cache="float")
    assert abs(record["logits"] - trace.logits[record["logits/positions"]]).max() <= 1e-4


@pytest.mark.parametrize(("length", "chunk", "mode"), [(40, 512, "exact"), (333, 50, "exact"), (333, 77, "bounded")])
def test_quantised_run_is_judged_choice_by_choice(nano, nano_oracle, length, chunk, mode):
    """Prefill in chunks, then decode; with the bounded decoder tail the oracle starts the decoder where we did."""
    record = record_of(nano, tokens_for(nano, length), chunk, decoder_prefill=mode)
    start = int(record[f"experts/{nano.config.encoder_layers}/positions"].min())
    assert start == (0 if mode == "exact" else length - nano.config.keep_tokens)
    report = judge(nano_oracle, record)
    assert "candidates" in report.kinds


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_quantised_run_with_production_rows(mini, mini_oracle, mode):
    judge(mini_oracle, record_of(mini, tokens_for(mini, 260), 100, decoder_prefill=mode))


@pytest.mark.parametrize("hit", [128, 256])
def test_encoder_replay_after_a_hit(nano, nano_oracle, hit):
    """Global rows of a cold run are kept, its window state is not: re-feed one window, write nothing below the hit."""
    config, tokens = nano.config, tokens_for(nano, hit + 45)
    blocks = list(range(1, 5))
    cache = CachePools(config, num_blocks=6, num_slots=3)
    cold = Recorder()
    chunk = Chunk(tokens=tokens, start=0, slot=1, blocks=blocks)
    nano.forward(StepBatch.build([chunk], nano.ratios), cache, StepRecorder({0: cold}))
    before = cache.save_blocks(blocks)

    start = hit - config.sliding_window
    cache.rings[:, 2] = 0x7F  # another request's leavings: NaN codes
    hot = Recorder()
    for first, last in ((start, hit - 3), (hit - 3, hit + 7), (hit + 7, len(tokens))):
        chunk = Chunk(
            tokens=tokens[first:last],
            start=first,
            slot=2,
            blocks=blocks,
            history=tokens[max(0, first - 3) : first],
            encoder_lower=start,
            decoder_lower=start,
            global_floor=hit,
        )
        nano.forward(StepBatch.build([chunk], nano.ratios), cache, StepRecorder({0: hot}))
    after = cache.save_blocks(blocks)
    for layer, (main, index) in before.items():
        pool = cache.pools[layer]
        whole = hit // 128
        assert main[:whole].equal(after[layer][0][:whole]) and index[:whole].equal(after[layer][1][:whole])
        assert pool.main[0].count_nonzero() == 0, "the padding block was written"
    record = {key: rows.numpy() for key, rows in hot.export().items()}
    assert record[f"main/{config.kv_source_layer_ids[0]}/positions"].min() >= hit - 1
    record["tokens"] = torch.tensor(tokens).numpy()
    cached = {key: rows.numpy() for key, rows in cold.export().items()}
    judge(nano_oracle, record, hit=hit, cached=cached)


def test_the_judge_sees_a_wrong_engine(nano, nano_oracle):
    """Tampering with each kind of export has to fail, else agreement above means nothing."""
    record = record_of(nano, tokens_for(nano, 90), 64, decoder_prefill="exact")
    for key in ("window/3", "main/4", "index/6", "experts/7", "topk/4"):
        broken = {k: v.copy() for k, v in record.items()}
        row = broken[key][60 if not key.startswith(("main", "index")) else 20]
        if key.startswith("experts"):
            row[0] = next(e for e in range(nano.config.n_routed_experts) if e not in row)
        elif key.startswith("topk"):
            row[0] = next(j for j in range(1, 30) if j not in row)
            row.sort()
        else:
            row[0] ^= 0x06
        _, report = nano_oracle.follow(broken)
        assert not report.passed, key
