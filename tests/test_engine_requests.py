"""Requests that come, fail and go: nothing is half done, nothing is kept, nobody else notices."""

from __future__ import annotations

import random

import pytest
import torch

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import EngineFull, Finished, GrammarSpec, Ready, SamplingParams, TokenOutput
from orchestrator.engine.sequence import State
from orchestrator.text.tokenizer import load_tokenizer

LONG = [3 + i % 400 for i in range(300)]


@pytest.fixture(scope="module")
def tokenizer(nano_path):
    return load_tokenizer(nano_path)


def engine_of(model, tokenizer=None, **options) -> Engine:
    return Engine(model, tokenizer, EngineConfig(**{"num_blocks": 32, "max_num_seqs": 4} | options))


def drain(engine: Engine) -> dict[str, list]:
    events: dict[str, list] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def ids_of(events: list) -> list[int]:
    return [e.token_id for e in events if isinstance(e, TokenOutput)]


def is_empty(engine: Engine) -> bool:
    scheduler = engine.scheduler
    return not engine.has_work and scheduler.blocks.used == scheduler.slots.used == 0 and not engine._sequences


BAD_PARAMS = {
    "temperature": [-1, 101, float("nan"), "hot", None, True],
    "top_p": [0, 1.1, -0.5, float("nan"), "all"],
    "top_k": [-1, 2**31, 1.5],
    "max_tokens": [0, -1, 2.5, "many"],
    "min_tokens": [-1, 17, 1.0],
    "seed": [2**64, -(2**63) - 1, 0.5, "one"],
    "logprobs": [-1, 21, True, 1.0],
    "stop": [("",), ("a",) * 17, (3,), 5, None, ("a", b"b")],
    "stop_token_ids": [(1.5,), ("a",), None, 2.5],
    "grammar": ["[a-z]", {"type": "object"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, bad in BAD_PARAMS.items() for value in bad])
def test_bad_parameters_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}: got .*, allowed is "):
        SamplingParams(**{name: value})


def test_one_stop_may_stand_alone():
    assert SamplingParams(stop="ab", stop_token_ids=7) == SamplingParams(stop=("ab",), stop_token_ids=(7,))


BAD_REQUESTS = [
    ("prompt", [], {}),
    ("prompt", [1, 512], {}),
    ("prompt", [-1], {}),
    ("prompt", ["a"], {}),
    ("prompt", [1.0], {}),
    ("prompt", [1] * 4096, {}),
    ("stop_token_ids", [1], {"stop_token_ids": (512,)}),
    ("grammar", [1], {"grammar": GrammarSpec("regex", "(")}),
    ("grammar", [1], {"grammar": GrammarSpec("json_schema", "{")}),
    ("grammar", [1], {"grammar": GrammarSpec("lark", "nonsense")}),
    ("grammar.kind", [1], {"grammar": GrammarSpec("ebnf", "x")}),
]


@pytest.mark.parametrize(("name", "prompt", "options"), BAD_REQUESTS)
def test_a_refused_request_leaves_nothing_behind(nano, tokenizer, name, prompt, options):
    engine = engine_of(nano, tokenizer)
    with pytest.raises(ValueError, match=f"^{name}\\b"):
        engine.add("r", prompt, SamplingParams(**options))
    assert is_empty(engine)
    engine.add("r", [1], SamplingParams())  # the id is free
    with pytest.raises(ValueError, match=r"^request_id: got 'r'"):
        engine.add("r", [1], SamplingParams())
    assert len(engine.scheduler.waiting) == 1


@pytest.mark.parametrize("options", [{"stop": ("a",)}, {"grammar": GrammarSpec("regex", "a")}])
def test_text_options_need_a_tokenizer(nano, options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}: .*no tokenizer"):
        engine_of(nano).add("r", [1], SamplingParams(**options))


def test_a_tokenizer_of_another_model_is_refused(mini, tokenizer):
    with pytest.raises(ValueError, match=r"^tokenizer: got 512 ids, allowed is 4096"):
        engine_of(mini, tokenizer)


def test_a_full_queue_refuses_and_keeps_its_order(nano):
    engine = engine_of(nano, max_num_seqs=1, max_waiting=2)
    for i in range(2):
        engine.add(str(i), [1], SamplingParams(max_tokens=2, ignore_eos=True))
    with pytest.raises(EngineFull) as error:
        engine.add("2", [1], SamplingParams())
    assert error.value.retry_after > 0
    engine.step()
    engine.add("2", [1], SamplingParams(max_tokens=2, ignore_eos=True))
    ends = [name for name, events in drain(engine).items() if isinstance(events[-1], Finished)]
    assert ends == ["0", "1", "2"] and is_empty(engine)


def test_an_id_may_come_back(nano):
    engine = engine_of(nano)
    for _ in range(2):
        engine.add("r", [1, 2], SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
        events = drain(engine)["r"]
        assert [type(e) for e in events] == [Ready] + [TokenOutput] * 3 + [Finished]
    assert is_empty(engine)


def reach(engine: Engine, state: str) -> None:
    """Bring request "r" into a state."""
    output = SamplingParams(max_tokens=200, seed=2, ignore_eos=True)
    if state in ("waiting", "parked"):
        engine.add("old", LONG[:250], output)
        engine.step()
    engine.add("r", LONG, SamplingParams(max_tokens=150, seed=1, ignore_eos=True))
    sequence = engine._sequences["r"]
    wanted = {
        "added": lambda: True,
        "waiting": lambda: sequence.state is State.WAITING,
        "prefill": lambda: 0 < sequence.computed < 300,
        "decode": lambda: sequence.output_len > 2,
        "parked": lambda: sequence.state is State.PARKED,
        "finished": lambda: sequence.state is State.FINISHED,
    }[state]
    if state == "waiting":
        engine.step()  # has to be passed over at least once
    for _ in range(400):
        if not wanted():
            engine.step()
    assert wanted()


@pytest.mark.parametrize("state", ["added", "waiting", "prefill", "decode", "parked", "finished"])
def test_abort_in_every_state_gives_everything_back(nano, state):
    blocks = {"waiting": 4, "parked": 6}.get(state, 16)
    engine = engine_of(nano, num_blocks=blocks, chunk_tokens=128)
    reach(engine, state)
    engine.take_events()
    engine.abort("r")
    engine.abort("r")
    engine.abort("unknown")
    assert "r" not in engine._sequences
    events = engine.take_events()
    if state == "finished":
        assert events == []
    else:
        assert [(e.request_id, e.reason) for e in events] == [("r", "abort")]
    held = sum(len(s.blocks) for s in engine.scheduler.running)
    assert engine.scheduler.blocks.used == held
    assert engine.scheduler.slots.used == len(engine.scheduler.running)
    assert not engine.scheduler.parked and not engine.scheduler.waiting
    left = drain(engine)
    assert "r" not in left and is_empty(engine)
    if "old" in left:
        assert left["old"][-1].reason == "length"


def test_aborts_do_not_change_what_others_get(nano):
    prompts = {str(i): LONG[i : i + 60 + 40 * i] for i in range(6)}
    params = {name: SamplingParams(max_tokens=30, seed=int(name), ignore_eos=True) for name in prompts}
    rng, engine = random.Random(4), engine_of(nano, num_blocks=8, chunk_tokens=64)
    for name in prompts:
        engine.add(name, prompts[name], params[name])
    events: dict[str, list] = {}
    while engine.has_work:
        if rng.random() < 0.1:
            engine.abort(rng.choice(["1", "3", "4"]))
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    assert is_empty(engine) and set(events) == set(prompts)
    for name in ("0", "2", "5"):
        alone = engine_of(nano)
        alone.add(name, prompts[name], params[name])
        assert ids_of(drain(alone)[name]) == ids_of(events[name])
        assert [type(e) for e in events[name]] == [Ready] + [TokenOutput] * 30 + [Finished]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_without_a_distribution_fail_their_request_only(nano, poison, monkeypatch):
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, logprobs=2)
    undisturbed = engine_of(nano)
    undisturbed.add("good", LONG[:9], params)
    expected = drain(undisturbed)["good"]

    engine, steps = engine_of(nano), 0
    original = engine.runner.run

    def run(step):
        nonlocal steps
        logits, rows = original(step)
        steps += 1
        if steps == 3:
            with torch.inference_mode():
                logits[[s.request_id for s in rows].index("bad"), 17] = poison
        return logits, rows

    monkeypatch.setattr(engine.runner, "run", run)
    engine.add("bad", LONG[:20], params)
    engine.add("good", LONG[:9], params)
    events = drain(engine)
    assert events["good"] == expected
    last = events["bad"][-1]
    assert (last.reason, last.completion_tokens) == ("error", 2) and "distribution" in last.error
    assert [type(e) for e in events["bad"]] == [Ready, TokenOutput, TokenOutput, Finished]
    assert is_empty(engine)


def test_ready_comes_once_and_first_however_often_a_request_is_parked(nano):
    engine = engine_of(nano, num_blocks=5, chunk_tokens=100, max_step_tokens=100)
    for i in range(4):
        engine.add(str(i), LONG[: 100 + 30 * i], SamplingParams(max_tokens=120, seed=i, ignore_eos=True))
    events = drain(engine)
    assert engine.stats.preemptions > 0 and is_empty(engine)
    for mine in events.values():
        assert [type(e) for e in mine] == [Ready] + [TokenOutput] * 120 + [Finished]


def test_counters(nano):
    engine = engine_of(nano, chunk_tokens=7, max_step_tokens=16)
    for i in range(3):
        engine.add(str(i), LONG[: 20 + i], SamplingParams(max_tokens=5, ignore_eos=True))
    drain(engine)
    assert (engine.stats.prompt_tokens, engine.stats.output_tokens) == (63, 15)
    assert engine.stats.steps > 0 and 0 < engine.stats.model_seconds < engine.stats.step_seconds
