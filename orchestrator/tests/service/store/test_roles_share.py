"""What a prefill and a decode engine leave in the store between them, as roles use them."""

from __future__ import annotations

from typing import Any

import pytest
from service_kit_store import config_of, engine_of, prompt_of, run_one

from orchestrator.cache.client import CacheClient
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.store.embedded import EmbeddedStore
from orchestrator.commands.prefix import name_model
from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.request import SamplingParams, TokenOutput
from orchestrator.service.store.shared import share


@pytest.fixture
def engines(nano, nano_path, tmp_path):
    """Engines over one store, each with a host tier of its own."""
    layout = BlockLayout.of(nano.config)
    store = EmbeddedStore(tmp_path / "store", layout.tag, 1 << 23)

    def make(name: str, mode: str) -> Any:
        engine = engine_of(config_of(nano_path, "none", None, mode), nano)
        name_model(engine, nano_path)
        arena = HostArena.create(tmp_path / name, layout.tag, 32, layout.block_bytes)
        share(engine.prefix, CacheClient.inline(store, arena, engine.prefix.scope), layout.block_bytes, 60.0)
        return engine

    return make


@pytest.mark.parametrize("mode", ["exact", "canonical"])
def test_a_third_engine_goes_on_from_prompt_and_answer(engines, cold, mode) -> None:
    """The prompt was read by one engine, the answer computed by another; both are named, stored, and hit."""
    prefill, decode, third = (engines(name, mode) for name in ("prefill", "decode", "third"))
    give, take = Handoffs(prefill), Handoffs(decode)
    prompt = prompt_of(600, 80)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    prefill.add("r", prompt, params, leaves_at=1)
    events = []
    while (sequence := prefill.find("r")) is not None and not sequence.leaves:
        events += prefill.step()
    take.take(give.give("r", "full"))
    events += prefill.take_events()
    assert give.conclude("r", taken=True) and prefill.prefix.tier.writer.flush(60)
    probe = third.prefix.tier.match([*prompt, 0], third.prefix.root_of("")).blocks
    assert probe == 4  # before the answer is there, and though the prefill engine may die now
    while decode.has_work:
        events += decode.step()
    assert decode.prefix.tier.writer.flush(60)
    answer = [event.token_id for event in events if isinstance(event, TokenOutput)]
    assert answer == cold(prompt, 60, mode)["tokens"]
    longer = prompt + answer + prompt_of(40, 81)
    found, expected = run_one(third, longer, 4), cold(longer, 4, mode)
    assert found["cached"] == 640
    assert (found["tokens"], found["logprobs"]) == (expected["tokens"], expected["logprobs"])


def test_windows_of_rows_in_doubt_are_not_shared(engines, monkeypatch) -> None:
    engine, other = engines("one", "exact"), engines("two", "exact")
    prompt = prompt_of(600, 82)
    whole = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda *given: whole(*given) * float("nan"))
    assert run_one(engine, prompt, 4)["reason"] == "error"
    assert engine.prefix.tier.writer.flush(60) and not engine.prefix.tier.writer.counts
    found = run_one(other, prompt, 4)
    assert found["cached"] == 0 and found["reason"] == "length"
