"""Real engines behind the roles: a prompt is computed by one, continued by another, moved to a third, replayed.

What a client gets is what one engine alone gives.
"""

from functools import partial

import pytest
from engines_kit import REQUESTS, EngineService, compare, crash_and_go_on, drain
from msgspec.structs import replace
from roles_kit import image, unreliable

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import GrammarSpec, SamplingParams, TokenOutput
from orchestrator.roles.engine_port import Begin, Drop, Export, PrefillChunk, RunPrefill
from orchestrator.roles.handoff_port import HandoffPort, decode_note, decode_params, encode_params
from orchestrator.roles.messages import Drain, RequestSpec


@pytest.fixture(scope="module")
def nano_path(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    return make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20)


@pytest.fixture(scope="module")
def nano(nano_path):
    from orchestrator.model.load import load_model

    return load_model(nano_path)


@pytest.fixture(scope="module")
def tokenizer(nano_path):
    from orchestrator.text.tokenizer import load_tokenizer

    return load_tokenizer(nano_path)


def real_service(model, tokenizer=None, *, replay_tail=False, **options):
    return EngineService(model, partial(HandoffPort, room=4000, replay_tail=replay_tail), tokenizer, **options)


def test_prefill_and_decode_apart_give_what_one_engine_gives(nano):
    service = real_service(nano, decode=2)
    service.ask_all(REQUESTS)
    service.finish(60)
    compare(service, nano, REQUESTS)


def test_a_prompt_that_is_cached_takes_few_steps(nano):
    """The core knows of no cache; what the engine found there is not asked for chunk by chunk."""
    engine = Engine(nano, None, EngineConfig(num_blocks=40, chunk_tokens=128, prefix_cache="exact", speculation="off"))
    port, spec = HandoffPort(engine), RequestSpec(tuple(i % 500 + 3 for i in range(2000)), 4)
    spec = replace(spec, params=encode_params(SamplingParams(max_tokens=4, temperature=0)))
    steps, states = [], []
    for number in range(2):
        name = f"r{number}"
        port.do(Begin(name, 1, spec, (), 0))
        (began,) = port.answers()
        assert not began.why
        at = count = 0
        while at < 2000:
            end = min(2000, at + 128)
            port.do(RunPrefill(count, (PrefillChunk(name, 1, 0, at, end - at, end == 2000),)))
            done = port.answers()[-1]
            assert not done.ahead or done.ahead[0][:2] == (name, 1)
            at, count = max([end, *(min(tokens, 1999) for *_, tokens in done.ahead)]), count + 1
        steps.append(count)
        port.do(Export(name, 1))
        (exported,) = port.answers()
        states.append(exported.manifest.output)
        port.do(Drop(name, 1))
        port.answers()
    assert states[0] == states[1] and len(states[0]) == 1
    assert steps[0] >= 8 and steps[1] <= 4, steps


def test_more_prompts_than_a_prefill_engine_has_rows_wait_for_those_before(nano):
    """A prompt keeps its row until its state has left; a step that needed more rows than there are would never end."""
    service = real_service(nano, decode=3)
    requests = {f"r{n}": ([n + 1, n + 2], SamplingParams(max_tokens=4, seed=n, ignore_eos=True)) for n in range(15)}
    service.ask_all(requests)
    service.finish(120)
    compare(service, nano, requests)


def test_a_dead_decode_worker_is_replayed_elsewhere(nano):
    service = real_service(nano, decode=2)
    service.ask_all(REQUESTS)
    assert service.run(20, lambda: len(service.answers["long"].tokens) >= 6)
    service.crash(service.core("entry").live["long"].worker)
    service.finish(60)
    assert service.core("entry").dropped.get("of a second worker", 0) == 0
    compare(service, nano, REQUESTS)


def test_a_drained_decode_worker_moves_requests_with_their_rows(nano):
    service = real_service(nano, decode=2)
    requests = {
        f"r{i}": (list(range(3 + i, 150 + 40 * i)), SamplingParams(max_tokens=250, seed=i, ignore_eos=True))
        for i in range(3)
    }
    drain(service, requests)
    compare(service, nano, requests)


@pytest.mark.parametrize("seed", range(3))
def test_a_bad_network_and_deaths_change_nothing(nano, seed):
    service = real_service(nano, prefill=2, decode=2, fate=unreliable(seed, 0.08, 0.2, 0.1))
    crash_and_go_on(service, REQUESTS, seed)
    compare(service, nano, REQUESTS)


def test_the_end_of_a_prompt_may_be_left_to_the_receiver(nano):
    service = real_service(nano, decode=1, replay_tail=True)
    requests = {"short": REQUESTS["short"], "greedy": REQUESTS["greedy"]}  # up to 140 tokens a replay is exact
    service.ask_all(requests)
    service.finish(60)
    offers = [message for _, _, _, message in service.sent if type(message).__name__ == "Offer"]
    assert offers and all(offer.manifest.replay_tail and offer.manifest.output == () for offer in offers)
    compare(service, nano, requests)


def test_log_probabilities_stand_beside_their_tokens(nano):
    params = SamplingParams(max_tokens=150, seed=3, ignore_eos=True, logprobs=2)
    engine = Engine(nano, None, EngineConfig(num_blocks=64, max_num_seqs=6, speculation="off"))
    engine.add("r", [4, 5, 6], params)
    expected = []
    while engine.has_work:
        expected += [(e.logprob, e.top_logprobs) for e in engine.step() if isinstance(e, TokenOutput)]
    service = real_service(nano, decode=2, fate=unreliable(1, 0.05, 0.2, 0.1))
    service.ask("r", [4, 5, 6], params)
    assert service.run(20, lambda: len(service.answers["r"].tokens) >= 8)
    worker = service.core("entry").live["r"].worker
    service.give(worker, Drain(worker, service.core(worker).incarnation, 0.01))
    service.run(1.0)
    if service.answers["r"].end is None:
        service.crash("decode-0")
        service.start("decode-0")
    service.fate = lambda source, to, message: [0.001]
    service.finish(60)
    notes = service.answers["r"].notes
    assert [decode_note(note) for note in notes] == expected and len(notes) == 150


def test_grammars_go_on_where_they_were(nano, tokenizer):
    service = real_service(nano, tokenizer, decode=2)
    spec = GrammarSpec("regex", "[a-d]{40}")
    requests = {"g": ([40, 41, 42], SamplingParams(max_tokens=60, seed=6, grammar=spec))}
    service.ask("g", *requests["g"])
    assert service.run(20, lambda: len(service.answers["g"].tokens) >= 4)
    service.crash(service.core("entry").live["g"].worker)
    service.finish(60)
    compare(service, nano, requests, tokenizer)


@pytest.mark.parametrize("what", ["prompt_logprobs", "images"])
def test_what_does_not_travel_is_refused_not_left_out(nano, what):
    service = real_service(nano)
    params = SamplingParams(max_tokens=4, seed=1, prompt_logprobs=what == "prompt_logprobs")
    spec = RequestSpec((1, 2), 4, 1, params=encode_params(params))
    port = service.engine("prefill-0").port
    port.do(Begin("r", 1, replace(spec, images=(image("x"),) if what == "images" else ())))
    (began,) = port.answers()
    assert what in began.why and not began.retry


def test_what_an_engine_refuses_is_refused_for_good(nano):
    service = real_service(nano)
    service.ask("bad", [1, 511], SamplingParams(max_tokens=4, seed=1, stop_token_ids=(600,)))
    service.finish(20)
    end = service.answers["bad"].end
    assert (end.outcome, end.status) == ("failed", 500) and "stop_token_ids" in end.reason


def test_params_travel_whole():
    params = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=3, max_tokens=5, min_tokens=1, stop=("a", "b"), stop_token_ids=(3,),
        ignore_eos=True, seed=9, logprobs=2, cache_salt="x", cache_class="agent",
        grammar=GrammarSpec("regex", "a+", after="</think>"),
    )  # fmt: skip
    assert decode_params(RequestSpec((1,), 1, params=encode_params(params))) == params
    with pytest.raises(ValueError, match="params"):
        decode_params(RequestSpec((1,), 1, params=b"\xc1"))
