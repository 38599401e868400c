"""Offline use: what a caller puts in and what comes back, in order and reproducibly."""

from __future__ import annotations

import pytest

from orchestrator import LLM, SamplingParams
from orchestrator.engine.request import Finished, GrammarSpec, Ready, TokenOutput

PROMPTS = ["def f(x):", "Hello", "The quick brown fox", "0", "import os\n"]


@pytest.fixture(scope="module")
def llm(nano_path) -> LLM:
    return LLM(nano_path, max_num_seqs=4, num_blocks=64)


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work and not llm._inboxes and scheduler.blocks.used == scheduler.slots.used == 0


def params(seed: int = 1, count: int = 6, **options) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, ignore_eos=True, **options)


def test_texts_and_ids_are_the_same_prompts(llm):
    ids = [llm.tokenizer.encode(text) for text in PROMPTS]
    by_text, by_ids = llm.generate(PROMPTS, params()), llm.generate(ids, params())
    assert by_text == by_ids
    assert [r.prompt_token_ids for r in by_text] == ids
    for result in by_text:
        assert result.text == llm.tokenizer.decode(result.token_ids)
        assert (result.finish_reason, len(result.token_ids), result.error) == ("length", 6, None)


def test_one_prompt_needs_no_list(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    assert llm.generate(PROMPTS[0], params()) == llm.generate([PROMPTS[0]], params()) == llm.generate(ids, params())
    assert llm.generate((PROMPTS[0], ids), params())[0] == llm.generate(ids, params())[0]


def test_no_prompts_give_no_results(llm):
    assert llm.generate([]) == llm.generate([], []) == llm.generate((), params(), progress=True, record=True) == []


def test_one_setting_for_each_prompt(llm):
    settings = [params(seed=i, count=i + 1) for i in range(5)]
    results = llm.generate(PROMPTS, settings)
    assert [len(r.token_ids) for r in results] == [1, 2, 3, 4, 5]
    for prompt, setting, result in zip(PROMPTS, settings, results, strict=True):
        assert llm.generate(prompt, setting) == [result]
    with pytest.raises(ValueError, match=r"^params: got 2, allowed is one, or one for each of 5 prompts"):
        llm.generate(PROMPTS, settings[:2])


def test_order_is_kept_with_more_prompts_than_slots_and_queue(nano_path):
    small = LLM(nano_path, max_num_seqs=2, max_waiting=3, num_blocks=16)
    prompts = [[3 + i] * (1 + i % 5) for i in range(20)]
    settings = [params(seed=i, count=1 + (7 * i) % 11) for i in range(20)]
    results = small.generate(prompts, settings)
    assert [r.prompt_token_ids for r in results] == prompts
    assert [len(r.token_ids) for r in results] == [s.max_tokens for s in settings]


def test_seeds_make_it_reproducible(llm):
    first, again, other = (llm.generate(PROMPTS, params(seed)) for seed in (5, 5, 6))
    assert first == again != other
    drawn = [llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_progress_bar_goes_to_the_terminal_only_when_wanted(llm, capfd):
    off = llm.generate(PROMPTS, params(), progress=False)
    silent = capfd.readouterr()
    assert silent.out == silent.err == ""
    assert llm.generate(PROMPTS, params(), progress=True) == off


def test_logprobs_stand_beside_the_tokens(llm):
    result = llm.generate(PROMPTS[0], params(logprobs=2, prompt_logprobs=True))[0]
    assert len(result.token_ids) == len(result.logprobs) == len(result.top_logprobs) == 6
    assert all(len(top) == 2 for top in result.top_logprobs)
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids) and result.prompt_logprobs[0] is None


def test_a_record_is_of_its_own_request(llm):
    together = llm.generate(PROMPTS, params(), record=True)
    for prompt, result in zip(PROMPTS, together, strict=True):
        alone = llm.generate(prompt, params(), record=True)[0].record
        assert set(alone) == set(result.record) >= {"tokens", "logits", "window/0", "experts/0"}
        assert all(result.record[key].equal(rows) for key, rows in alone.items())
        assert result.record["tokens"].tolist() == result.prompt_token_ids + result.token_ids[:-1]
    assert llm.generate(PROMPTS[0], params())[0].record is None


def test_a_stream_has_the_events_of_generate(llm):
    events = list(llm.stream(PROMPTS[0], params()))
    assert [type(e) for e in events] == [Ready] + [TokenOutput] * 6 + [Finished]
    assert [e.token_id for e in events[1:-1]] == llm.generate(PROMPTS[0], params())[0].token_ids


def test_leaving_a_stream_aborts_it_and_disturbs_nobody(llm):
    expected = llm.generate(PROMPTS, params())
    for event in llm.stream(PROMPTS[1], params(count=1000)):
        if isinstance(event, TokenOutput):
            break
    del event
    assert not llm.engine.has_work
    assert llm.generate(PROMPTS, params()) == expected


def test_generate_while_a_stream_is_open(llm):
    expected = llm.generate(PROMPTS, params())
    alone = list(llm.stream(PROMPTS[1], params(seed=3, count=20)))
    stream = llm.stream(PROMPTS[1], params(seed=3, count=20))
    events = [next(stream), next(stream)]
    assert llm.generate(PROMPTS, params()) == expected
    events += stream
    assert [getattr(e, "token_id", None) for e in events] == [getattr(e, "token_id", None) for e in alone]


@pytest.mark.parametrize(
    ("name", "prompt", "setting"),
    [
        ("prompt", [], params()),
        ("prompt", [100_000], params()),
        ("prompt", [1] * 9000, params()),
        ("grammar", [1], SamplingParams(grammar=GrammarSpec("regex", "("))),
        ("stop_token_ids", [1], SamplingParams(stop_token_ids=(9999,))),
        ("params", [1], {"max_tokens": 3}),
    ],
)
def test_errors_come_before_anything_runs(llm, name, prompt, setting):
    steps = llm.engine.stats.steps
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        llm.generate([[1, 2], prompt], [params(), setting])
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        llm.stream([prompt][0], setting)
    assert llm.engine.stats.steps == steps


def test_an_engine_error_leaves_no_request_behind(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS, params())
    assert not llm.engine.has_work
    assert len(llm.generate(PROMPTS, params())) == 5


def test_unknown_options_are_refused(nano_path):
    with pytest.raises(ValueError, match=r"^max_num_seqs: got 0"):
        LLM(nano_path, max_num_seqs=0)
