"""A request that goes from engine to engine has the tokens of one that stayed, whatever else runs on both."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from orchestrator.engine.request import GrammarSpec, SamplingParams
from orchestrator.engine.sequence import State
from orchestrator.engine.speculator import Speculator

sys.path.insert(0, str(Path(__file__).parent))
from handoff_kit import LONGEST, Pair


@pytest.fixture
def pair(kit, nano):
    return lambda *args, **options: Pair(kit, nano, *args, **options)


def params(seed, **options):
    return SamplingParams(**{"seed": seed, "max_tokens": 30, "ignore_eos": True, "logprobs": 2} | options)


MODES = [("alone", "off"), ("alone", 5), ("alone", "scheduled"), ("in order", 5), ("worker", "scheduled")]


@pytest.mark.parametrize(("mode", "speculation"), MODES)
def test_tokens_of_one_that_stayed(kit, nano, pair, mode, speculation):
    """After prefill, in the midst of a prompt, in the midst of decoding, several times in a row, with others beside."""
    there_and_back(kit, nano, pair, mode, speculation)


@pytest.mark.parametrize("mode", ["alone", "worker"])
def test_tokens_without_drafts_at_the_arrival(kit, nano, pair, mode, monkeypatch):
    """As where too many logits would have to be copied for them: they come with the next step."""
    monkeypatch.setattr(Speculator, "join", lambda self, sequence: None)
    there_and_back(kit, nano, pair, mode, 5)


def there_and_back(kit, nano, pair, mode, speculation):
    rng = random.Random(f"{mode} {speculation}")
    requests = {
        str(i): (
            kit.prompt_of(rng.choice([1, 2, 31, 33, 127, 128, 129, 150, 257, 300]), i),
            params(
                i,
                temperature=rng.choice([0.0, 0.8, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                max_tokens=rng.randrange(2, 40),
            ),
        )
        for i in range(16)
    }
    expected = kit.run(kit.engine_of(nano, speculation="off"), requests)
    both = pair(mode=mode, speculation=speculation, chunk_tokens=50)
    if speculation != "off":
        known = {p.seed: prompt + expected[name][0] for name, (prompt, p) in requests.items()}
        for engine in both.engines:
            kit.tutor(engine, known, lambda seed, position: (seed + position) % 6)
    home = {}
    for name, (prompt, setting) in requests.items():
        home[name] = int(name) % 2
        both.engines[home[name]].add(name, prompt, setting)
    moved = 0
    for _ in range(LONGEST):
        if not any(engine.has_work for engine in both.engines):
            break
        both.step()
        running = [n for n in home if n not in both.ends]
        for name in rng.sample(running, min(len(running), rng.randrange(6))):
            sequence = both.engines[home[name]].find(name)
            if sequence is None or sequence.state is State.WAITING:
                continue
            if both.move(name, home[name], 1 - home[name]):
                home[name], moved = 1 - home[name], moved + 1
    assert both.finish() == expected
    assert moved > 8 and both.kept > 0, (moved, both.kept)


def text_requests(tokenizer):
    """Grammars of each kind, stop strings, minimum lengths, end tokens: what is rebuilt from tokens."""
    fields = '{"a": {"type": "string", "maxLength": 12}, "b": {"enum": [1, 22]}}'
    schema = f'{{"type": "object", "properties": {fields}, "required": ["a", "b"]}}'
    prompt = tokenizer.encode("Write something: ")
    return {
        "schema": (prompt, params(1, grammar=GrammarSpec("json_schema", schema), max_tokens=36)),
        "regex": (prompt, params(2, grammar=GrammarSpec("regex", "(ab|c[de]){3,9}z"), min_tokens=4, max_tokens=24)),
        "lark": (prompt[:1], params(3, grammar=GrammarSpec("lark", 'start: "x" /[0-9]{2,20}/ "y"'), temperature=0.7)),
        "greedy": (prompt, params(4, grammar=GrammarSpec("regex", "[a-z ]{30}"), temperature=0.0, max_tokens=28)),
        "least": (
            prompt,
            params(5, min_tokens=15, max_tokens=24, ignore_eos=False, stop_token_ids=tuple(range(40, 90))),
        ),
        "bytes": (prompt[:3], params(6, max_tokens=24)),
    }


@pytest.mark.parametrize(("mode", "speculation"), [("alone", 5), ("worker", "scheduled")])
def test_grammars_stops_and_text(kit, nano, tokenizer, pair, mode, speculation):
    """Every request moves behind every step, to and fro among three engines; text is whole, stop strings never show."""
    requests = text_requests(tokenizer)
    free = kit.run(kit.engine_of(nano, tokenizer, speculation="off"), requests)
    for i, name in enumerate(("bytes", "greedy", "least")):
        text = free[name][2]
        stop = text[len(text) // 2 : len(text) // 2 + 3 + i]  # across tokens, somewhere in the midst
        requests[f"stop {name}"] = (
            requests[name][0],
            params(requests[name][1].seed, stop=(stop, "never there"), max_tokens=24),
        )
    expected = kit.run(kit.engine_of(nano, tokenizer, speculation="off"), requests)
    assert expected["stop bytes"][3].stop_sequence or expected["stop least"][3].stop_sequence
    three = pair(tokenizer, count=3, mode=mode, speculation=speculation, max_num_seqs=16)
    for i, (name, (prompt, setting)) in enumerate(requests.items()):
        three.engines[i % 3].add(name, prompt, setting)
    home, moved = {name: i % 3 for i, name in enumerate(requests)}, 0
    while any(engine.has_work for engine in three.engines):
        three.step()
        for name in [n for n in home if n not in three.ends]:
            if three.move(name, home[name], (home[name] + 1) % 3):
                home[name], moved = (home[name] + 1) % 3, moved + 1
    assert three.finish() == expected
    assert moved > 40


def test_a_secret_seed_and_drafts_come_along(kit, nano, pair):
    """Without a seed of its own a request's tokens depend on its drafts: they are made again where it goes on."""
    setting = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, logprobs=0)
    prompt = kit.prompt_of(150, 3)
    alone = pair(count=1, speculation=5)
    alone.engines[0].add("r", prompt, setting, seed=-5)
    expected = alone.finish()
    assert alone.engines[0].stats.accepted > 0
    both = pair(speculation=5)
    other = (kit.prompt_of(40, 9), params(9, max_tokens=60))
    both.engines[1].add("other", *other)
    both.engines[0].add("r", prompt, setting, seed=-5)
    for turn in range(8):
        both.step()
        source = both.engines[turn % 2].find("r")
        drafts, confidence, stale = list(source.drafts), list(source.confidence), source.stale
        assert len(drafts) == 5
        assert both.move("r", turn % 2, 1 - turn % 2)
        there = both.engines[1 - turn % 2].find("r")
        assert (there.drafts, there.confidence, there.stale) == (drafts, confidence, stale)
    found = both.finish()
    assert found["r"] == expected["r"]
    assert both.engines[0].stats.drafts + both.engines[1].stats.drafts > 40
    assert found["other"] == kit.run(kit.engine_of(nano, speculation="off"), {"other": other})["other"]


def test_log_probabilities_of_the_prompt(kit, nano, pair):
    """Moved within the prompt, they are given once, by the engine where the request ends."""
    request = {"r": (kit.prompt_of(200, 5), params(1, prompt_logprobs=True, max_tokens=6))}
    expected = kit.run(kit.engine_of(nano), request)
    both = pair(chunk_tokens=30)
    both.engines[0].add("r", *request["r"])
    for turn in range(9):
        both.step()
        both.move("r", turn % 2, 1 - turn % 2)
    assert both.finish() == expected
    assert len(expected["r"][3].prompt_logprobs) == 200


def test_parked_requests_leave_too(kit, nano, pair):
    """A request whose rows are host copies goes without coming back first."""
    requests = {str(i): (kit.prompt_of(110, i), params(i, max_tokens=60)) for i in range(4)}
    expected = kit.run(kit.engine_of(nano, speculation="off"), requests)
    both = pair(num_blocks=5, speculation="off")
    for name, request in requests.items():
        both.engines[0].add(name, *request)
    gone = 0
    for _ in range(LONGEST):
        if not both.engines[0].scheduler.has_work:
            break
        both.step()
        for sequence in list(both.engines[0].scheduler.parked):
            gone += both.move(sequence.request_id, 0, 1)
    assert gone
    assert both.finish() == expected


@pytest.mark.parametrize(("prefix", "mode", "seed"), [("off", "worker", 1), ("exact", "in order", 3)])
def test_random_histories(kit, nano, prefix, mode, seed):
    """Three small engines, requests with common beginnings: added, moved whole or by tokens, kept, aborted, parked.

    At every moment blocks add up and nobody holds another's; tokens are those of a request that nobody disturbed.
    """
    rng = random.Random(seed)
    roots = [kit.prompt_of(280, 60 + i) for i in range(2)]
    requests = {
        str(i): (
            rng.choice(roots)[: rng.randrange(1, 280)] + kit.prompt_of(rng.randrange(1, 60), i),
            params(i, max_tokens=rng.randrange(1, 50), temperature=rng.choice([0.0, 0.9])),
        )
        for i in range(16)
    }
    expected = kit.run(kit.engine_of(nano, speculation="off", num_blocks=96, max_num_seqs=12), requests)
    pools = {"num_blocks": 9, "max_num_seqs": 4, "chunk_tokens": 90, "prefix_cache": prefix}
    three = Pair(kit, nano, count=3, mode=mode, **pools)
    waiting, home, aborted, done = list(requests), {}, set(), {"full": 0, "tokens": 0}
    for _ in range(LONGEST):
        if not waiting and not any(engine.has_work for engine in three.engines):
            break
        while waiting and rng.random() < 0.4:
            name = waiting.pop()
            home[name] = rng.randrange(3)
            three.engines[home[name]].add(name, *requests[name])
        three.step()
        for name in [n for n in home if n not in three.ends and rng.random() < 0.15]:
            sequence, source = three.engines[home[name]].find(name), home[name]
            if sequence is None:
                continue
            if rng.random() < 0.03:
                three.engines[source].abort(name)
                aborted.add(name)
                continue
            form = "tokens" if sequence.state is State.WAITING or rng.random() < 0.1 else "full"
            target = (source + rng.randrange(1, 3)) % 3
            if three.move(name, source, target, form):
                home[name], done[form] = target, done[form] + 1
        for engine in three.engines:
            _sound(engine)
    found = three.finish()
    for name, outcome in found.items():
        if name in aborted:
            assert outcome[3].reason == "abort"
            assert outcome[0] == expected[name][0][: len(outcome[0])]
        else:
            assert outcome[:3] == expected[name][:3], name
    assert len(found) == len(requests) and done["full"] > 5 and done["tokens"] > 2 and three.kept, (done, three.kept)


def _sound(engine):
    scheduler = engine.scheduler
    live = [s for s in (*scheduler.running, *scheduler.leaving) if s.slot]
    slots = [s.slot for s in live]
    assert len(set(slots)) == len(slots) == scheduler.slots.used - scheduler.slots.fenced
    held = [block for s in live for block in s.blocks]
    assert all(len(set(s.blocks)) == len(s.blocks) for s in live)
    blocks = scheduler.blocks
    if engine.prefix is None:
        assert len(set(held)) == len(held) == blocks.used - blocks.fenced
    else:
        assert sum(blocks.pool.counts.values()) == blocks.capacity
        assert len(set(held)) == blocks.used
