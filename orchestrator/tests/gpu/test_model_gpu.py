"""The trained model and the engine on an NVIDIA GPU, against the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_core.testing.child import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FOLDER = Path(__file__).parents[3] / "models" / "v41-mini"
PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n'


@pytest.fixture(scope="module")
def models():
    from orchestrator.model.load import load_model

    if not FOLDER.is_dir():
        pytest.skip("models/v41-mini is not there")
    return {name: load_model(FOLDER, device=name) for name in ("cpu", "cuda")}


@pytest.fixture(scope="module")
def requests():
    return load_file(Path(__file__).parents[1] / "device" / "conftest.py").Requests


@pytest.fixture(scope="module")
def prompt():
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(PROMPT).ids


def gap(model, tokens, one, other):
    """How much larger the model's logit of `one` is than that of `other`, behind `tokens`, in fresh caches."""
    from orchestrator.model.batch import Chunk, StepBatch
    from orchestrator.model.cache import CachePools

    blocks = list(range(1, 2 + len(tokens) // 128))
    cache = CachePools(model.config, len(blocks) + 1, 2, device=model.device)
    batch = StepBatch.build([Chunk(tokens=tokens, start=0, slot=1, blocks=blocks, logits="last")], model.ratios)
    with torch.inference_mode():
        logits = model.forward(batch, cache)[-1]
    return float(logits[one] - logits[other])


def generate(model, prompts, tokens, **options):
    pytest.importorskip("llguidance", reason="the engine needs llguidance")
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine
    from orchestrator.engine.request import SamplingParams, TokenOutput

    plain = {"speculation": "off", "overlap": False, "num_blocks": 32, "max_num_seqs": 8}
    engine = Engine(model, None, EngineConfig(**{"device": model.device.type} | plain | options))
    for i, prompt in enumerate(prompts):
        engine.add(f"{i}", prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    found = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                found[int(event.request_id)].append(event.token_id)
    return found, engine


@torch.inference_mode()
@pytest.mark.parametrize("quantised", [False, True])
def test_logits(models, requests, quantised):
    """With float32 caches all but the experts is float32, and their inputs are rounded to bfloat16. Packed caches meet
    more kernels that round to bfloat16, and a rounding may move a cached value by a whole code, so single logits differ
    more than most.
    """
    from orchestrator.model.batch import StepBatch

    found = {}
    for name, model in models.items():
        batch = requests(model, [5, 40, 130], quantised=quantised)
        rows = [batch.prefill()]
        for _ in range(3):
            step = StepBatch.build(batch.next_chunks(), model.ratios)
            rows.append(model.forward(step, batch.cache))
        found[name] = torch.cat(rows).cpu()
    difference = (found["cpu"] - found["cuda"]).abs()
    assert found["cuda"].isfinite().all()
    largest = found["cpu"].abs().max()
    if quantised:
        assert difference.median() < 0.02 * largest and difference.max() < 0.2 * largest
    else:
        assert difference.median() < 2e-3 * largest and difference.max() < 2e-2 * largest


@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_tokens_are_those_of_the_cpu(models, prompt, graphs):
    """Up to a token whose logit the CPU has within what kernels' rounding moves; 0.15 is the 90th percentile."""
    (expected,), _ = generate(models["cpu"], [prompt], 48)
    (actual,), engine = generate(models["cuda"], [prompt], 48, cuda_graphs=graphs)
    apart = next((i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b), None)
    if apart is not None:
        assert apart >= 4, "the first tokens are far from a tie"
        assert 0 <= gap(models["cpu"], prompt + expected[:apart], expected[apart], actual[apart]) < 0.15
    assert graphs == (engine.runner.graphs is not None) and not (graphs and engine.runner.graphs.failed)


@pytest.mark.parametrize("options", [{"overlap": True}, {"speculation": 5}, {"speculation": 5, "overlap": True}])
@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_and_overlap_change_no_token(models, prompt, options, graphs):
    prompts = [prompt, prompt[:7] * 20, prompt[3:]]
    expected, _ = generate(models["cuda"], prompts, 40, cuda_graphs=False)
    actual, engine = generate(models["cuda"], prompts, 40, cuda_graphs=graphs, **options)
    assert actual == expected
    if engine.pipeline is not None:
        assert graphs == (engine.pipeline.graphs is not None) and not (graphs and engine.pipeline.graphs.failed)
        assert engine.pipeline.clock.steps > 5


def test_graphs_change_no_token_of_a_batch(models, prompt):
    """Two requests need no padding row, so that every product has the same sizes; five are padded to eight."""
    prompts = [prompt, prompt[:7] * 20]
    eager, _ = generate(models["cuda"], prompts, 24, cuda_graphs=False)
    replayed, engine = generate(models["cuda"], prompts, 24)
    assert replayed == eager and not engine.runner.graphs.failed
    padded, engine = generate(models["cuda"], [prompt[: 5 + i] for i in range(5)], 6)
    assert all(len(tokens) == 6 for tokens in padded) and not engine.runner.graphs.failed


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [[7], [4, 126], [125, 3, 9, 60]])
def test_replay_equals_eager_in_every_bit(models, requests, lengths):
    """Sizes without padding rows, over a block's end."""
    from orchestrator.engine.decode_batch import decode_shape, padded_batch
    from orchestrator.engine.graphs import DecodeGraphs

    model = models["cuda"]
    eager, replayed = requests(model, lengths), requests(model, lengths)
    eager.prefill(), replayed.prefill()
    graphs = DecodeGraphs(model, replayed.cache, largest=8, context=512)
    for _ in range(4):
        chunks = eager.next_chunks()
        step = padded_batch(chunks, decode_shape(chunks, 8, 512), model.ratios)
        expected = model.forward(step, eager.cache)
        actual = graphs.run(replayed.next_chunks())
        assert actual is not None and actual.equal(expected)
    assert eager.cache.rings[:, 1:].equal(replayed.cache.rings[:, 1:])
    for layer, pool in eager.cache.pools.items():
        assert pool.main.equal(replayed.cache.pools[layer].main) and pool.index.equal(replayed.cache.pools[layer].index)


@torch.inference_mode()
def test_a_step_does_not_wait_for_the_device(models, requests):
    from orchestrator.model.batch import StepBatch

    model = models["cuda"]
    batch = requests(model, [5, 40])
    batch.prefill()
    model.forward(StepBatch.build(batch.next_chunks(), model.ratios), batch.cache)
    step = StepBatch.build(batch.next_chunks(), model.ratios)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.forward(step, batch.cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def test_parked_state_comes_back_unchanged(models, requests):
    batch = requests(models["cuda"], [200])
    batch.prefill()
    cache, blocks = batch.cache, batch.blocks[0]
    before = [t.clone() for p in cache.pools.values() for t in (p.main, p.index)] + [cache.rings.clone()]
    saved = cache.save_blocks(blocks), cache.save_slot(1)
    assert saved[1].rings.device.type == "cpu"
    for pool in cache.pools.values():
        pool.main.zero_(), pool.index.zero_()
    cache.rings.zero_()
    cache.load_blocks(blocks, saved[0])
    cache.load_slot(1, saved[1])
    after = [t for p in cache.pools.values() for t in (p.main, p.index)] + [cache.rings]
    assert all(a.equal(b) for a, b in zip(after, before, strict=True))
