"""Whole models in PyTorch's operators, as a GPU runs what has no kernel: the same results, and no look at a value."""

from __future__ import annotations

import pytest
import torch

from kernel_core import using
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.decode_batch import decode_shape, padded_batch
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import SamplingParams, TokenOutput
from orchestrator.engine.sampler import Sampler
from orchestrator.model.batch import StepBatch


def test_the_watch_sees_what_it_is_for(watch):
    with watch() as reads:
        x = torch.arange(4)
        x[x > 1].sum().item()
        torch.tensor([1.0])
        torch.repeat_interleave(x, x)
    assert len(reads.found) == 4, reads.found


@pytest.mark.parametrize("model", ["nano", "mini"])
def test_a_decode_step_reads_nothing_back(model, request, requests, watch):
    model = request.getfixturevalue(model)
    batch = requests(model, [4, 37])
    batch.prefill()
    chunks = batch.next_chunks()
    step = padded_batch(chunks, decode_shape(chunks, 4, 300), model.ratios)
    with using("library"), torch.inference_mode():
        model.reserve_positions(300)
        with watch() as reads:
            logits = model.forward(step, batch.cache)
    assert logits.shape == (2, model.config.vocab_size) and reads.count > 500
    assert reads.found == set()


def test_sampling_reads_nothing_back_but_its_result(nano, watch):
    import dspark_kernels

    logits = torch.randn(3, nano.config.vocab_size)
    one, ids = torch.ones(3), torch.arange(3)
    words = torch.randint(0, 2**31 - 1, (3, 16), dtype=torch.int32)
    with using("library"), watch() as reads:
        dspark_kernels.apply_token_mask(logits, words, ids)
        dspark_kernels.sample(logits, one, one * 0.5, ids.int(), ids, ids)
        dspark_kernels.top_logprobs(logits, 5)
    assert reads.found == set()


@pytest.mark.parametrize("model", ["nano", "mini"])
def test_logits_equal_the_native_ones(model, request, requests):
    """In float32 caches, where nothing is rounded to a few bits. Chunked prefill, a mixed batch, decode steps."""
    model = request.getfixturevalue(model)
    found = {}
    for backend in ("native", "library"):
        batch = requests(model, [5, 20, 41], quantised=False)
        with using(backend), torch.inference_mode():
            found[backend] = [batch.prefill()]
            for _ in range(3):
                step = StepBatch.build(batch.next_chunks(), model.ratios)
                found[backend].append(model.forward(step, batch.cache))
        found[backend] = torch.stack(found[backend])
    difference = (found["native"] - found["library"]).abs().max()
    assert difference < 2e-4 * found["native"].abs().max(), float(difference)
    assert found["native"].argmax(-1).equal(found["library"].argmax(-1))


def greedy(model, prompt: list[int], tokens: int, backend: str) -> list[int]:
    with using(backend):
        engine = Engine(model, None, EngineConfig(num_blocks=4, max_num_seqs=2, chunk_tokens=16, max_step_tokens=16))
        engine.add("r", prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        found = []
        while engine.has_work:
            found += [event.token_id for event in engine.step() if isinstance(event, TokenOutput)]
    return found


def test_greedy_tokens_of_the_trained_model_are_those_of_the_native_engine(mini):
    from orchestrator.commands.paths import project_root
    from orchestrator.text.tokenizer import load_tokenizer

    prompt = load_tokenizer(project_root() / "models" / "v41-mini").encode("def fibonacci(n):\n    if n")
    native = greedy(mini, prompt, 16, "native")
    assert len(native) == 16 and greedy(mini, prompt, 16, "library") == native


def test_greedy_tokens_of_the_random_model(nano):
    prompt = [7, 3, 99, 401, 5, 5, 8]
    assert greedy(nano, prompt, 12, "library") == greedy(nano, prompt, 12, "native")


def test_sampler_gives_the_same_tokens(nano):
    class Row:
        matcher = None
        output_len = 9
        tokens = (1, 2, 3)
        seed = 4

        def __init__(self, **params):
            self.params = SamplingParams(**params)

    rows = [Row(temperature=0), Row(temperature=0.8, top_p=0.9), Row(temperature=1.2, top_k=5, logprobs=3)]
    logits = torch.randn(3, nano.config.vocab_size)
    samples = {}
    for backend in ("native", "library"):
        with using(backend):
            samples[backend] = Sampler(nano.config.vocab_size, (1,)).sample(logits.clone(), rows)
    for one, other in zip(samples["native"], samples["library"], strict=True):
        assert one.token == other.token and [a for a, _ in one.alternatives] == [a for a, _ in other.alternatives]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
