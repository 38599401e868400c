"""Retrieval trials with a model whose answers are known."""

from __future__ import annotations

import pytest
import torch

from orchestrator.evaluate.feed import Feeder
from orchestrator.evaluate.needle import Needle, answer_of, hit_rate, measure_needles, needle_maker


def test_prompts_hold_the_value_and_end_before_it(tokenizer):
    import random

    make = needle_maker(tokenizer, ["x = 1\ny = 2\n" * 50])
    text, answer = make(random.Random(1), 500, 0.5)
    assert text.count(answer) == 1 and not text.endswith(answer)
    assert len(tokenizer.encode(text)) == pytest.approx(500, abs=60)
    assert 0.3 < text.index(answer) / len(text) < 0.7


def test_the_answer_is_the_greedy_continuation(nano, tokenizer):
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine
    from orchestrator.engine.request import SamplingParams, TokenOutput

    prompt = tokenizer.encode("def f(x):\n    return x\n" * 9)
    engine = Engine(nano, None, EngineConfig(num_blocks=8))
    engine.add("a", list(prompt), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    tokens = []
    while engine.has_work:
        tokens += [e.token_id for e in engine.step() if isinstance(e, TokenOutput)]
    assert answer_of(nano, tokenizer, prompt, 6) == tokenizer.decode(tokens)[:6]


def test_right_and_half_right_answers_are_counted(nano, tokenizer, monkeypatch):
    def say(text):
        ids = iter(tokenizer.encode(text))

        def logits(*_, **__):
            row = torch.zeros(1, nano.config.vocab_size)
            row[0, next(ids)] = 1.0
            return row

        monkeypatch.setattr(Feeder, "run", logits)
        monkeypatch.setattr(Feeder, "step", logits)

    def make(rng, tokens, depth):
        return "some text", "123456"

    say("123456")
    assert measure_needles(nano, tokenizer, make, 100, 0.5, 1) == Needle(100, 0.5, 1, 1, 1.0)
    say("123999")
    assert measure_needles(nano, tokenizer, make, 100, 0.5, 1) == Needle(100, 0.5, 1, 0, 0.5)


def test_the_error_of_a_rate_is_never_zero():
    rate = hit_rate([Needle(100, d, 5, 5, 1.0) for d in (0.1, 0.5)])
    assert rate.value == 1 and 0.05 < rate.stderr < 0.15
