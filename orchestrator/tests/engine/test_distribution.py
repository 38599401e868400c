"""Requests without a seed: drafts are judged by rejection sampling, and texts keep the target's own distribution."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from orchestrator.balance.cost_curve import CostCurve
from orchestrator.balance.speculation import Budget
from orchestrator.engine.request import SamplingParams

PROMPT = [5, 9, 200, 31]
TOP, TOKENS, COUNT = 3, 3, 1500
LIMIT = {26: 63.2, 1: 15.1}  # chi-square that one in 10,000 right samplers exceeds, by degrees of freedom


def texts_of(kit, model) -> dict[tuple[int, ...], float]:
    """Chance of every text of TOKENS tokens, each one of the TOP most likely ones, by enumeration without drafts."""
    engine = kit.engine_of(model, speculation="off")
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for text, chance in chances.items():
            engine.add("r", [*PROMPT, *text], SamplingParams(temperature=0, max_tokens=1, logprobs=TOP))
            events = [e for _ in range(9) if engine.has_work for e in engine.step()]
            best = next(e.top_logprobs for e in events if getattr(e, "top_logprobs", ()))
            total = sum(math.exp(lp) for _, lp in best)
            longer |= {(*text, token): chance * math.exp(lp) / total for token, lp in best}
        chances = longer
    return chances


@pytest.fixture(scope="module")
def expected(kit, nano):
    return texts_of(kit, nano)


def guess(engine, chances) -> None:
    """Drafts from each place's marginal, flattened: often right, never quite the target's distribution."""
    drafter = engine.speculator.drafter
    original = drafter.block
    places = [Counter() for _ in range(TOKENS)]
    for text, chance in chances.items():
        for place, token in enumerate(text):
            places[place][token] += chance

    def block(anchors, positions, *args):
        made = original(anchors, positions, *args)
        made.logits.fill_(-30.0)
        for row, position in enumerate(positions.tolist()):
            for k in range(made.logits.shape[1]):
                for token, chance in places[min(position + 1 - len(PROMPT) + k, TOKENS - 1)].items():
                    made.logits[row, k, token] = 0.5 * math.log(chance)
        return made

    drafter.block = block


def chi_square(seen: Counter, chances: dict[tuple[int, ...], float], count: int) -> float:
    assert set(seen) <= set(chances)
    return sum((seen[text] - count * p) ** 2 / (count * p) for text, p in chances.items())


@pytest.mark.parametrize(
    ("speculation", "mode"), [(2, "alone"), (5, "in order"), ("scheduled", "alone"), ("scheduled", "in order")]
)
def test_texts_are_distributed_as_the_targets_own(kit, nano, expected, speculation, mode, monkeypatch):
    rng = random.Random(11)
    monkeypatch.setattr("orchestrator.engine.engine.secrets.randbits", rng.getrandbits)
    engine = kit.engine_of(nano, speculation=speculation, max_num_seqs=50, num_blocks=64, max_waiting=COUNT, mode=mode)
    if speculation == "scheduled":  # a staircase that makes totals jump, so that most drafts are cut
        engine.speculator.budget = Budget(CostCurve((50, 80, 120, 300), (1.0, 1.05, 1.5, 4.0), staircase=True))
    guess(engine, expected)
    params = SamplingParams(top_k=TOP, max_tokens=TOKENS, ignore_eos=True)
    outcomes = kit.run(engine, {str(i): (PROMPT, params) for i in range(COUNT)})
    seen = Counter(tuple(tokens) for tokens, *_ in outcomes.values())
    assert chi_square(seen, expected, COUNT) < LIMIT[TOP**TOKENS - 1]
    assert 0.2 < engine.stats.accepted / engine.stats.drafts < 0.98
    wrong = {text: 1 / len(expected) for text in expected}
    assert chi_square(seen, wrong, COUNT) > LIMIT[TOP**TOKENS - 1], "the test could not tell another distribution"


def outcome(budget: Budget, stale: bool) -> float:
    """Chance of token A with p = (0.7, 0.3), q = (0.5, 0.5) and a second draft that is certain behind A only."""
    p, q, chance = (0.7, 0.3), (0.5, 0.5), 0.0
    for draft in (0, 1):
        current = (0.8, 0.9) if draft == 0 else (0.8, 0.0)
        total = budget.total(1, [(0.8, 0.9) if stale else current])
        if total == 0:  # the draft is not looked at, the target draws
            chance += q[draft] * p[0]
            continue
        accept = min(1.0, p[draft] / q[draft])
        left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        redrawn = left[0] / sum(left)
        chance += q[draft] * (accept * (draft == 0) + (1 - accept) * redrawn)
    return chance


def test_a_total_from_current_confidences_would_be_biased():
    """The counterexample of the scheduler's paper: peeking at what follows a draft decides whether it is judged."""
    budget = Budget(CostCurve((1, 2, 3), (1.0, 2.0, 1 / 0.45)))
    assert budget.total(1, [(0.8, 0.9)]) == 2 and budget.total(1, [(0.8, 0.0)]) == 0
    assert outcome(budget, stale=True) == pytest.approx(0.7)
    assert outcome(budget, stale=False) == pytest.approx(0.85)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_engine_uses_old_confidences_for_the_total(kit, nano, wrong, monkeypatch):
    """The same counterexample through the engine: a planted scheduler that peeks fails the test that ours passes."""
    rng, count = random.Random(5), 420
    monkeypatch.setattr("orchestrator.engine.engine.secrets.randbits", rng.getrandbits)
    model = kit.engine_of(nano, speculation="off")
    model.add("r", PROMPT, SamplingParams(temperature=0, max_tokens=1, logprobs=2, seed=1))
    first = next(e for _ in range(3) for e in model.step() if getattr(e, "top_logprobs", ())).token_id
    engine = kit.engine_of(nano, speculation="scheduled", max_num_seqs=1)
    engine.speculator.budget = Budget(CostCurve((1, 2, 3), (1.0, 2.0, 1 / 0.45)))
    prompt = [*PROMPT, first]
    off = kit.engine_of(nano, speculation="off")
    off.add("r", prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=2))
    pair = next(e.top_logprobs for _ in range(3) for e in off.step() if getattr(e, "top_logprobs", ()))
    a, b = (token for token, _ in pair)
    p = torch.tensor([lp for _, lp in pair]).softmax(0)[0].item()
    drafter = engine.speculator.drafter
    original, propose = drafter.block, drafter.propose

    def block(*args):
        made = original(*args)
        made.logits.fill_(-30.0)
        made.logits[:, :, [a, b]] = 0.0
        return made

    def certain(*args, **options):
        proposed = propose(*args, **options)
        behind = (proposed.records.tokens[:, 0] == a).float()
        proposed.confidence[:] = torch.stack([torch.full_like(behind, 0.8), 0.9 * behind] + [0 * behind] * 3, 1)
        return proposed

    drafter.block, drafter.propose = block, certain
    drafter.markov_head = lambda bias: torch.zeros(len(bias), nano.config.vocab_size)
    if wrong:
        total = Budget.total

        def peek(self, requests, confidences, most=None):
            mine = [s.confidence for s in engine.scheduler.running if s.drafts]
            return total(self, requests, mine, most)

        monkeypatch.setattr(Budget, "total", peek)
    hits = Counter()
    # The first token is drawn without drafts; only texts that begin as the enumeration does are counted.
    for i in range(count):
        engine.add(str(i), PROMPT, SamplingParams(top_k=2, max_tokens=4, ignore_eos=True))
        tokens: list[int] = []
        while len(tokens) < 2:
            tokens += [event.token_id for event in engine.step() if hasattr(event, "token_id")]
        engine.abort(str(i))
        engine.take_events()
        if tokens[0] == first:
            hits[tokens[1] == a] += 1
    seen = sum(hits.values())
    assert seen > count / 3
    value = (hits[True] - seen * p) ** 2 / (seen * p) + (hits[False] - seen * (1 - p)) ** 2 / (seen * (1 - p))
    assert (value > LIMIT[1]) == wrong, (hits, p)


def test_enumeration_is_itself_a_distribution(expected):
    assert sum(expected.values()) == pytest.approx(1.0)
    assert len(expected) == TOP**TOKENS and len(set(itertools.chain(*expected))) > TOP
