"""Speculative decoding with the model's functions against plain decoding by the engine."""

from __future__ import annotations

import random

import pytest
import torch

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import SamplingParams, TokenOutput
from orchestrator.evaluate.acceptance import measure_acceptance, summarise
from orchestrator.evaluate.feed import Feeder, Piece
from orchestrator.evaluate.prompts import QUESTIONS, Prompt, code_prompts, conversation_prompts
from orchestrator.evaluate.speculate import Trial, speculate
from orchestrator.model.drafter import Drafter

OUTPUT = 24


@pytest.fixture(scope="module")
def prompts(nano):
    rng = random.Random(4)
    return [[rng.randrange(nano.config.vocab_size) for _ in range(n)] for n in (1, 2, 31, 90, 150, 257)]


def plain(model, prompts, **options) -> list[list[int]]:
    engine = Engine(model, None, EngineConfig(num_blocks=32))
    outputs: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.add(str(i), list(prompt), SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, **options))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                outputs[int(event.request_id)].append(event.token_id)
    return outputs


class Oracle(Drafter):
    """A drafter that knows the answer, up to a place that differs from request to request and step to step."""

    answers: list[list[int]]
    prompts: list[list[int]]

    def draft(self, anchors, positions, slots, cache, temperature, seeds):
        drafts = super().draft(anchors, positions, slots, cache, temperature, seeds)
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            known = self.prompts[slot - 1] + self.answers[slot - 1]
            right = known[position + 1 : position + 1 + (position + slot) % 7]
            for k, token in enumerate(right[: drafts.tokens.shape[1]]):
                drafts.tokens[row, k] = token
                drafts.log_q[row, k] = -torch.inf
                drafts.log_q[row, k, token] = 0.0
        return drafts


def test_greedy_output_is_that_of_plain_decoding(nano, prompts):
    assert speculate(nano, Drafter(nano), prompts, OUTPUT).outputs == plain(nano, prompts)


def test_greedy_output_does_not_depend_on_how_many_drafts_stand(nano, prompts):
    """The random drafter is nearly always wrong, so here right drafts are slipped in: 0 to 5 of them a step."""
    expected = plain(nano, prompts)
    drafter = Oracle(nano)
    drafter.answers, drafter.prompts = expected, prompts
    decoded = speculate(nano, drafter, prompts, OUTPUT)
    assert decoded.outputs == expected
    assert {t.kept for t in decoded.trials} == {0, 1, 2, 3, 4, 5}


def test_an_end_token_ends_a_request_and_nothing_else(nano, prompts):
    expected = plain(nano, prompts)
    end = expected[3][10]
    drafter = Oracle(nano)
    drafter.answers, drafter.prompts = expected, prompts
    outputs = speculate(nano, drafter, prompts, OUTPUT, eos=[end]).outputs
    for got, whole in zip(outputs, expected, strict=True):
        stop = whole.index(end) + 1 if end in whole else OUTPUT
        assert got == whole[:stop]


def test_sampled_output_is_reproducible_and_independent_of_the_batch(nano, prompts):
    drafter = Drafter(nano)
    together = speculate(nano, drafter, prompts, OUTPUT, temperature=1.0, seed=5).outputs
    assert together == speculate(nano, drafter, prompts, OUTPUT, temperature=1.0, seed=5).outputs
    assert together != speculate(nano, drafter, prompts, OUTPUT, temperature=1.0, seed=6).outputs
    assert speculate(nano, drafter, prompts[:1], OUTPUT, temperature=1.0, seed=5).outputs[0] == together[0]


def test_sampled_first_tokens_follow_the_model(nano):
    """The token behind the first one, over many requests: accepted drafts and replacements together."""
    prompt = [5, 9, 2, 40, 17]
    count = 400
    outputs = speculate(nano, Drafter(nano), [prompt] * count, 2, temperature=1.0).outputs
    seconds = torch.tensor([o[1] for o in outputs if o[0] == outputs[0][0]])
    feeder = Feeder(nano, 1, 10)
    first = torch.tensor([o[0] for o in outputs]).bincount(minlength=512) / count
    p = feeder.run(Piece(0, prompt, 0, 5))[-1].softmax(-1)
    assert (first - p).abs().max() < 5 * (p.max() / count).sqrt()
    p = feeder.run(Piece(0, [*prompt, outputs[0][0]], 5, 6))[-1].softmax(-1)
    seen = seconds.bincount(minlength=512) / len(seconds)
    assert (seen - p).abs().max() < 5 * (p.max() / len(seconds)).sqrt() + 1 / len(seconds)


def test_figures_of_given_trials():
    def trial(request, kept, offered=5, ended=False):
        return Trial(request, kept, offered, ended, (0.0,) * 5, (0.5,) * 5)

    found = summarise("code", 0.0, [trial(0, 5), trial(0, 0), trial(1, 1), trial(1, 2, 2, ended=True)])
    assert found.length.value == (6 + 1 + 2 + 2) / 4
    assert [r.value for r in found.rates] == [3 / 4, 2 / 3, 1, 1, 1]
    assert found.cases == (4, 3, 1, 1, 1) and found.prompts == 2
    with pytest.raises(ValueError, match="trials"):
        summarise("code", 0.0, [])


def test_every_kind_of_prompt_and_all_of_them(nano, heldout, tokenizer):
    prompts = code_prompts(heldout, 3, 50) + conversation_prompts(tokenizer)[:2]
    found = measure_acceptance(nano, Drafter(nano), prompts, 1.0, 6, eos=tokenizer.eos_ids)
    assert [(a.kind, a.prompts) for a in found] == [("code", 3), ("conversation", 2), ("all", 5)]
    assert found[2].steps == found[0].steps + found[1].steps
    assert len({t.request for t in found[2].trials}) == 5


def test_conversations_are_as_the_server_renders_them(tokenizer):
    prompts = conversation_prompts(tokenizer)
    assert len(prompts) == len(QUESTIONS) == len(set(QUESTIONS))
    text = tokenizer.decode(prompts[0].tokens, skip_control=False)
    assert text == f"<｜begin▁of▁sentence｜><｜User｜>{QUESTIONS[0]}<｜Assistant｜></think>"
    assert isinstance(prompts[0], Prompt)


def test_bad_input_is_named(nano):
    drafter = Drafter(nano)
    with pytest.raises(ValueError, match="prompts"):
        speculate(nano, drafter, [[]], 3)
    with pytest.raises(ValueError, match="max_tokens: got 0"):
        speculate(nano, drafter, [[1]], 0)
