"""Rejected drafts leave no trace: rings, compressor tails, global rows and look-back, at every depth and accept length.

Tokens and the bits of their log-probabilities are those of a run that never speculates.
"""

from __future__ import annotations

import pytest

from orchestrator.engine.request import SamplingParams

OUTPUT = 30
LENGTHS = (1, 2, 31, 32, 33, 66, 126, 129)  # both parities, around the window's, the tail's and a block's borders


def requests_for(kit, model):
    vocab = model.config.vocab_size
    return {
        str(i): (
            kit.prompt_of(n, i, vocab),
            SamplingParams(temperature=0, max_tokens=OUTPUT, seed=i, ignore_eos=True, logprobs=2),
        )
        for i, n in enumerate(LENGTHS)
    }


def known_of(requests, expected):
    return {int(name): requests[name][0] + expected[name][0] for name in requests}


@pytest.fixture(scope="module")
def truth(kit, nano, nano7):
    models = {"nano": nano, "nano7": nano7}
    return {name: (m, kit.run(kit.engine_of(m, speculation="off"), requests_for(kit, m))) for name, m in models.items()}


@pytest.mark.parametrize(("name", "depth"), [*(("nano", d) for d in range(1, 6)), ("nano7", 6), ("nano7", 7)])
def test_every_depth_and_every_accept_length(kit, truth, name, depth):
    model, expected = truth[name]
    requests = requests_for(kit, model)
    known = known_of(requests, expected)
    for accepted in range(depth + 1):
        engine = kit.engine_of(model, speculation=depth)
        kit.tutor(engine, known, lambda seed, position, n=accepted: n)
        assert kit.run(engine, requests) == expected, (depth, accepted)
        # The last step of a request has less room than it drafts for.
        assert engine.stats.accepted >= 0.7 * accepted / (1 + accepted) * OUTPUT * len(LENGTHS) - 8 * depth
        if accepted == 0:
            assert engine.stats.accepted == 0 and engine.stats.drafts > 0


@pytest.mark.parametrize("name", ["nano", "nano7"])
@pytest.mark.parametrize(("seed", "mode"), [(0, "alone"), (1, "in order"), (2, "worker")])
def test_mixed_accept_lengths(kit, truth, name, seed, mode):
    """Every request's parity and accept length differ from step to step, and so do the rows of a batch."""
    model, expected = truth[name]
    requests = requests_for(kit, model)
    engine = kit.engine_of(model, max_num_seqs=3 + 2 * seed, mode=mode)
    places = model.config.draft_length + 1
    kit.tutor(engine, known_of(requests, expected), lambda s, p: (5 * s + 3 * p + p // 7 + seed) % places)
    assert kit.run(engine, requests) == expected
    assert 0 < engine.stats.accepted < engine.stats.drafts


def test_the_rings_are_as_large_as_that_takes(kit, nano):
    """A planted fault: one row less in every ring gives other tokens, so the tests above would see it."""
    expected = kit.run(kit.engine_of(nano, speculation="off"), requests_for(kit, nano))
    engine = kit.engine_of(nano, speculation=5)
    engine.cache.rings = engine.cache.rings[:, :, : nano.config.sliding_window].contiguous()
    kit.tutor(engine, known_of(requests_for(kit, nano), expected), lambda seed, position: position % 2)
    assert kit.run(engine, requests_for(kit, nano)) != expected
