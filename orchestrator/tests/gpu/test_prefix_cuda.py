"""The prefix cache on an NVIDIA GPU: blocks and windows in device memory, beside overlapped steps and graphs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FOLDER = Path(__file__).parents[3] / "models" / "v41-mini"
TEXT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n        return n\n'
STEPS = {
    "alone": {"overlap": False, "speculation": "off", "cuda_graphs": False},
    "overlapped": {"overlap": True, "speculation": 5, "cuda_graphs": False},
    "graphs": {"overlap": True, "speculation": 5, "cuda_graphs": True},
}


@pytest.fixture(scope="module")
def model():
    from orchestrator.model.load import load_model

    if not FOLDER.is_dir():
        pytest.skip("models/v41-mini is not there")
    pytest.importorskip("llguidance", reason="the engine needs llguidance")
    return load_model(FOLDER, device="cuda")


@pytest.fixture(scope="module")
def text():
    import tokenizers

    ids = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(TEXT).ids
    return lambda length: (ids * (1 + length // len(ids)))[:length]


def engine_of(model, prefix, steps, **options):
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine

    sizes = {"num_blocks": 48, "max_num_seqs": 8, "device": "cuda", "prefix_cache": prefix}
    engine = Engine(model, None, EngineConfig(**(sizes | STEPS[steps] | options)))
    if engine.prefix is not None:
        engine.prefix.stride = 512
    return engine


def run(engine, prompts, tokens=24):
    """Tokens and cached tokens of each prompt."""
    from orchestrator.engine.request import Finished, SamplingParams, TokenOutput

    for i, prompt in enumerate(prompts):
        engine.add(f"{i}", prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    found, cached = [[] for _ in prompts], [0] * len(prompts)
    for _ in range(4000):
        if not engine.has_work:
            break
        for event in engine.step():
            if isinstance(event, TokenOutput):
                found[int(event.request_id)].append(event.token_id)
            elif isinstance(event, Finished):
                assert event.reason == "length", event
                cached[int(event.request_id)] = event.cached_tokens
    assert not engine.has_work and engine.scheduler.blocks.used == engine.scheduler.slots.used == 0
    return found, cached


def poison(engine):
    """Rings and tails of nobody hold what must not be read."""
    engine.cache.rings.fill_(0x7F)
    for tail in engine.cache.tails.values():
        tail.fill_(torch.nan)


@pytest.mark.parametrize("steps", list(STEPS))
@pytest.mark.parametrize("prefix", ["exact", "canonical", "bounded"])
def test_hot_prompts_have_the_tokens_of_cold_ones(model, text, prefix, steps):
    """Repeated, longer and shorter prompts, several at once; windows are there, so no mode replays unless it must."""
    prompts = [text(700), text(690) + text(40), text(900)]
    fresh = "canonical" if prefix == "canonical" else "off"
    expected = [run(engine_of(model, fresh, steps), [prompt])[0][0] for prompt in prompts]
    engine = engine_of(model, prefix, steps)
    addresses = {layer: (p.main.data_ptr(), p.index.data_ptr()) for layer, p in engine.cache.pools.items()}
    assert run(engine, prompts[:1]) == ([expected[0]], [0])
    poison(engine)
    found, cached = run(engine, prompts)
    assert found == expected and min(cached) >= 256
    poison(engine)
    found, cached = run(engine, prompts)
    assert found == expected and min(cached) >= 512
    assert addresses == {layer: (p.main.data_ptr(), p.index.data_ptr()) for layer, p in engine.cache.pools.items()}
    if steps == "graphs":
        assert not engine.pipeline.graphs.failed


@pytest.mark.parametrize("steps", ["overlapped", "graphs"])
def test_overlapped_decode_leaves_windows(model, text, steps):
    from orchestrator.cache.windows import WindowKey

    prompt = text(200)
    engine = engine_of(model, "exact", steps)
    (answer,), _ = run(engine, [prompt], 250)
    chain = engine.prefix.chain_of(prompt + answer[:-1])
    assert all(engine.prefix.windows.has(WindowKey(key, 128 * (n + 1))) for n, key in enumerate(chain.keys))
    longer = prompt + answer + text(180)
    poison(engine)
    found, cached = run(engine, [longer])
    assert cached == [384] and found == run(engine_of(model, "off", steps), [longer])[0]


@pytest.fixture
def shared_folder():
    """In memory: files of a disk cannot be pinned for a GPU."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("steps", list(STEPS))
def test_blocks_come_back_from_the_store(model, text, steps, tmp_path, shared_folder):
    """Bytes on the way down are those of the pool, bytes on the way up land where the next forward pass reads them."""
    from orchestrator.cache.client import CacheClient
    from orchestrator.cache.host.arena import HostArena
    from orchestrator.cache.layout import BlockLayout
    from orchestrator.cache.store.embedded import EmbeddedStore
    from orchestrator.engine.prefix_tier import PrefixTier

    layout = BlockLayout.of(model.config)
    store = EmbeddedStore(tmp_path / "store", layout.tag, 1 << 28)
    engines = []
    for name in ("first", "second"):
        engine = engine_of(model, "canonical", steps)
        arena = HostArena.create(shared_folder / name, layout.tag, 32, layout.block_bytes)
        engine.prefix.tier = PrefixTier(CacheClient.inline(store, arena, engine.prefix.scope))
        engines.append(engine)
    first, second = engines
    prompt = text(900)
    expected, _ = run(first, [prompt], 150)
    found, cached = run(second, [prompt], 150)
    assert found == expected and cached == [512] and second.prefix.tier.loads.method == "stage"
    keys = first.prefix.chain_of(prompt + expected[0][:-1]).keys
    assert len(keys) == 8 and second.prefix.tier.match(prompt + expected[0], second.prefix.root_of("")).blocks >= 4
    mine, theirs = (e.cache.save_blocks(e.scheduler.blocks.match(keys[:4])) for e in engines)
    assert all(torch.equal(a, b) for n in mine for a, b in zip(mine[n], theirs[n], strict=True))


def test_a_small_pool_parks_evicts_and_shares(model, text):
    prompts = [text(300 + 90 * n) for n in range(6)]
    expected = [run(engine_of(model, "off", "overlapped"), [prompt], 100)[0][0] for prompt in prompts]
    engine = engine_of(model, "exact", "overlapped", num_blocks=14, max_num_seqs=4)
    for _ in range(2):
        assert run(engine, prompts, 100)[0] == expected
    assert engine.scheduler.blocks.free == engine.scheduler.blocks.capacity
