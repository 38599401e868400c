"""The same tokens with and without drafts: many prompts, every depth, alone, in any batch and on any schedule."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from orchestrator.balance.cost_curve import CostCurve
from orchestrator.balance.speculation import Budget
from orchestrator.engine.request import SamplingParams

PER_DEPTH = 50


def requests_for(kit, depth: int, count: int, temperature: float, output: int = 12):
    rng = random.Random(depth)
    return {
        str(i): (
            kit.prompt_of(rng.choice([1, 2, 3, 7, 20, 31, 32, 33, 64, 100, 127, 128, 140]), 1000 * depth + i),
            SamplingParams(temperature=temperature, seed=1000 * depth + i, max_tokens=output, ignore_eos=True),
        )
        for i in range(count)
    }


def tokens_of(outcomes) -> dict[str, list[int]]:
    return {name: tokens for name, (tokens, *_) in outcomes.items()}


@pytest.mark.parametrize("depth", range(1, 6))
def test_hundreds_of_prompts_in_a_batch_and_alone(kit, nano, depth):
    requests = requests_for(kit, depth, PER_DEPTH, 0.0)
    plain = tokens_of(kit.run(kit.engine_of(nano, speculation="off", max_num_seqs=16, num_blocks=64), requests))
    known = {p.seed: prompt + plain[name] for name, (prompt, p) in requests.items()}

    def right(seed, position):
        return random.Random(f"{seed} {position}").randrange(depth + 1)

    mode = ("alone", "in order", "worker")[depth % 3]
    batched = kit.engine_of(nano, speculation=depth, max_num_seqs=16, num_blocks=64, mode=mode)
    kit.tutor(batched, known, right)
    assert tokens_of(kit.run(batched, requests)) == plain
    single = kit.engine_of(nano, speculation=depth, max_num_seqs=1, mode=mode)
    kit.tutor(single, known, right)
    for name in list(requests)[::10]:
        assert kit.run(single, {name: requests[name]})[name][0] == plain[name]


@pytest.mark.parametrize("mode", ["alone", "in order"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_schedule_gives_the_same_tokens(kit, nano, mode, temperature, monkeypatch):
    """Totals at random, and batches of random sizes: repeatable requests do not notice."""
    requests = requests_for(kit, 7, 12, temperature, output=20)
    plain = tokens_of(kit.run(kit.engine_of(nano, speculation="off"), requests))
    known = {p.seed: prompt + plain[name] for name, (prompt, p) in requests.items()}
    rng = random.Random(3)
    monkeypatch.setattr(Budget, "total", lambda self, requests, chances, most=None: rng.randrange(most + 1))
    lengths = set()
    for seqs in (1, 3, 8):
        engine = kit.engine_of(nano, max_num_seqs=seqs, mode=mode)
        kit.tutor(engine, known, lambda seed, position: position % 6)
        assert tokens_of(kit.run(engine, requests)) == plain
        lengths.add((engine.stats.drafts, engine.stats.steps))
    assert len(lengths) == 3


@pytest.mark.parametrize("mode", ["alone", "in order"])
def test_a_seed_repeats_without_a_tutor_too(kit, nano, mode):
    """The drafter's own drafts, drawn with the target's numbers: the text is the plain one, whatever stands."""
    requests = requests_for(kit, 8, 16, 0.7, output=16)
    plain = tokens_of(kit.run(kit.engine_of(nano, speculation="off"), requests))
    engine = kit.engine_of(nano, mode=mode)
    engine.speculator.weigh_by(CostCurve((8, 12, 48), (1.0, 1.1, 3.0), staircase=True))
    assert tokens_of(kit.run(engine, requests)) == plain
    assert 0 < engine.stats.drafts < 5 * engine.stats.verifications


@pytest.mark.parametrize("mode", ["alone", "in order"])
def test_drafting_that_does_not_pay_rests_and_is_tried_again(kit, nano, mode, monkeypatch):
    requests = requests_for(kit, 9, 4, 0.0, output=90)
    plain = tokens_of(kit.run(kit.engine_of(nano, speculation="off"), requests))
    engine = kit.engine_of(nano, mode=mode)
    engine.speculator.weigh_by(CostCurve((1, 24), (1.0, 50.0), draft_requests=(1, 4), draft_seconds=(5.0, 5.0)))
    drafter, blocks = engine.speculator.drafter, []
    original = drafter.block
    monkeypatch.setattr(drafter, "block", lambda *args: (blocks.append(engine.stats.steps), original(*args))[1])
    assert tokens_of(kit.run(engine, requests)) == plain
    gaps = [b - a for a, b in pairwise(blocks)]
    assert max(gaps) >= 60 and len(blocks) < 40 and blocks[-1] > 70


def test_settings_are_checked(kit, nano):
    for value in (0, -1, 2.5, "always", True):
        with pytest.raises(ValueError, match=r"^speculation: got"):
            kit.engine_of(nano, speculation=value)
    with pytest.raises(ValueError, match="speculation: got 6, allowed is at most 5"):
        kit.engine_of(nano, speculation=6)
    assert kit.engine_of(nano, speculation="off").cache.rings.shape[0] == nano.config.num_hidden_layers


def test_a_model_without_draft_stages_decodes_plainly(kit, tmp_path):
    from orchestrator.model.load import load_model
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    model = load_model(make_model(v41_nano(stages=0), tmp_path / "plain", seed=1))
    engine = kit.engine_of(model, mode="in order")
    assert engine.speculator is None
    request = {"r": ([5, 9, 3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))}
    assert kit.run(engine, request) == kit.run(kit.engine_of(model), request)
    with pytest.raises(ValueError, match="speculation: got 2, allowed is at most 0"):
        kit.engine_of(model, speculation=2)
