"""What travels, byte by byte: as much as the tables of state say, all of a request, and nothing of anybody else."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from orchestrator.cache.block_object import HEADER_BYTES
from orchestrator.cache.layout import BlockLayout
from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.handoff.identity import model_id, wire_tag
from orchestrator.engine.handoff.messages import Offer, State, decode
from orchestrator.engine.handoff.parts import FORMAT, handoff_of, open_part
from orchestrator.engine.request import SamplingParams
from orchestrator.engine.sequence import Sequence
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_flash, v41_mini, v41_nano


def greedy(tokens=400, **options):
    return SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True} | options)


def opened(door, parts):
    """Payloads by name."""
    handoff = handoff_of(parts[0].data)
    return {
        name: open_part(FORMAT if name == "offer" else door.layout, handoff, number, name, data)
        for number, (name, data) in enumerate(parts)
    }


def handed(kit, model, length, steps=1, form="full", **options):
    engine = kit.engine_of(model, **{"speculation": 3} | options)
    engine.add("r", kit.prompt_of(length, 1), greedy())
    for _ in range(steps):
        engine.step()
    door = Handoffs(engine)
    return door, opened(door, door.give("r", form))


def test_the_numbers_of_the_full_model():
    """890 bytes a token, blocks of 113,920, rings of 134 rows, tails of 7: 3,128,352 bytes beside the global rows.

    Sources count 3,128,928 for rings and tails in one device slot, whose parts are aligned there; rows are the same.
    """
    config = v41_flash()
    assert config.global_bytes_per_token == 890 and BlockLayout.of(config).block_bytes == 113_920
    ring, tail = config.ring_rows * config.window_row_bytes, config.tail_rows * 2 * config.head_dim * 4
    assert (ring, 20 * ring, tail) == (70_752, 1_415_040, 28_672)
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    assert (layers, layers * ring, layers * ring + 3 * tail) == (43, 3_042_336, 3_128_352)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 500])
def test_bytes_of_each_kind(kit, nano, length):
    config = nano.config
    door, payloads = handed(kit, nano, length, steps=3)
    sizes = Counter()
    for name, payload in payloads.items():
        sizes[door.kind(name)] += len(payload)
    state = decode(payloads["state"], State)
    blocks = -(-state.written // 128)
    assert state.computed == state.written == len(payloads["tokens"]) // 4 - 1 >= length
    assert sizes["global"] == blocks * config.block_bytes == blocks * 128 * config.global_bytes_per_token
    ring = config.ring_rows * config.window_row_bytes
    assert sizes["window"] == config.num_hidden_layers * ring
    assert sizes["drafter"] == config.num_nextn_predict_layers * ring
    assert sizes["tail"] == sum(r == 2 for r in map(config.ratio, config.kv_source_layer_ids)) * (
        config.tail_rows * 2 * config.head_dim * 4
    )
    assert sizes["window"] + sizes["drafter"] + sizes["tail"] == door.engine.cache.slot_bytes
    assert sizes["sampler"] < 4096
    leaving = door._leaving["r"]
    assert leaving.sent.total() == sum(map(len, payloads.values())) + HEADER_BYTES * len(payloads)
    for name, kind in (("nothing", None), ("window", None), ("image/0", "lookback")):
        if kind is None:
            with pytest.raises(ValueError, match=r"^name: got"):
                door.kind(name)
        else:
            assert door.kind(name) == kind


def test_layers_of_a_block_make_a_block_at_rest(kit, nano):
    """Joined over the source layers, the parts of a full block are what the store keeps."""
    engine = kit.engine_of(nano)
    engine.add("r", kit.prompt_of(300, 1), greedy())
    engine.step()
    layout = BlockLayout.of(nano.config)
    stored = layout.gather(engine.cache, engine.find("r").blocks)
    door = Handoffs(engine)
    payloads = opened(door, door.give("r"))
    for number in range(2):
        joined = b""
        for layer in nano.config.kv_source_layer_ids:
            size = sum(s.size for s in layout.sections if s.layer == layer)
            joined += payloads[f"rows/{layer}/0/3"][number * size : (number + 1) * size]
        assert joined == stored[number]


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("length", "steps"), [(1, 1), (5, 1), (31, 2), (130, 1), (131, 4)])
def test_nothing_of_anybody_else_leaves(kit, nano, quantised, length, steps):
    """Whatever blocks and slots held before, the parts are those of an engine that was empty."""
    found = []
    for filler in (0, 0x55):
        engine = kit.engine_of(nano, speculation=5, quantised_caches=quantised)
        for values in (engine.cache.rings, *engine.cache.tails.values()):
            values.view(torch.uint8).fill_(filler)
        for pool in engine.cache.pools.values():
            pool.main.view(torch.uint8).fill_(filler)
            pool.index.view(torch.uint8).fill_(filler)
        engine.add("r", kit.prompt_of(length, 1), greedy())
        for _ in range(steps):
            engine.step()
        door = Handoffs(engine)
        payloads = opened(door, door.give("r"))
        found.append({n: p for n, p in payloads.items() if n.split("/")[0] in ("rows", "window", "tail")})
    assert found[0] == found[1]
    assert any(map(any, found[0].values()))


CARRIED = {name: name for name in (
    "params", "prompt_len", "max_total", "request_id", "computed", "announced", "preemptions", "drafts", "confidence",
    "stale", "hit", "global_floor", "encoder_lower", "decoder_lower", "publishable", "stops", "prompt_logprobs", "seed",
)}  # fmt: skip
REBUILT = {"text", "matcher", "chain", "shares"}  # from tokens, parameters and the root of the sender's keys
PARTS = {"tokens", "blocks", "slot", "parked", "images"}
LOCAL = {
    "order",
    "state",
    "planned",
    "aborted",
    "leaves_at",
    "published",
    "window",
    "fetch",
    "fetch_first",
    "stored",
    "snapped",
    "unshared",
}
REFUSED = {"recorder"}


def test_every_field_of_a_request_is_accounted_for():
    """A new field of `Sequence` has to be carried, rebuilt, or known to matter to one engine alone."""
    fields = {field.name for field in dataclasses.fields(Sequence)}
    known = [set(CARRIED), REBUILT, PARTS, LOCAL, REFUSED]
    assert set().union(*known) == fields
    assert sum(map(len, known)) == len(fields)
    assert set(CARRIED) <= set(Offer.__struct_fields__) | set(State.__struct_fields__)


def test_what_is_carried_arrives(kit, nano, tokenizer):
    """Field by field, of a request that uses all of them."""
    one, other = (kit.engine_of(nano, tokenizer, speculation=5, prefix_cache="exact") for _ in range(2))
    kit.run(one, {"before": (kit.prompt_of(300, 1), greedy(2))})
    settings = greedy(40, stop=("never there",), min_tokens=3, logprobs=1, cache_salt="", seed=7, temperature=0.5)
    one.add("r", kit.prompt_of(300, 1) + kit.prompt_of(90, 2), settings)
    for _ in range(4):
        one.step()
    sent = one.find("r")
    before = {name: getattr(sent, name) for name in CARRIED}
    assert before["hit"] and before["drafts"] and before["stale"] and before["announced"]
    door = Handoffs(one)
    Handoffs(other).take(door.give("r", labels={"tenant": "a"}))
    came = other.find("r")
    assert {name: getattr(came, name) for name in CARRIED} == before
    assert came.tokens == sent.tokens and came.shares and came.text.pending == sent.text.pending
    for engine in (one, other):
        engine.abort("r")
        assert engine.scheduler.blocks.used == 0


def test_names_of_models_and_layouts(kit, nano, nano7, tmp_path):
    """By contents, not by place: the same files give the same name, one other tensor another."""
    from orchestrator.model.load import load_model

    again = load_model(make_model(v41_nano(), tmp_path / "again", seed=20))
    assert model_id(again) == model_id(nano) != model_id(nano7)
    assert model_id(nano, b"x") != model_id(nano)
    again.weights.layers[3].sink[0] += 1
    assert model_id(again) != model_id(nano)
    engines = [kit.engine_of(nano), kit.engine_of(nano, num_blocks=7, max_num_seqs=3, speculation="off")]
    assert len({wire_tag(engine.cache) for engine in engines}) == 1
    others = [kit.engine_of(nano, quantised_caches=False), kit.engine_of(nano7), *engines]
    assert len({wire_tag(engine.cache) for engine in others}) == 3


def test_labels_come_with_the_offer(kit, nano):
    engine, other = kit.engine_of(nano), kit.engine_of(nano)
    engine.add("r", [1, 2, 3], greedy())
    engine.step()
    parts = Handoffs(engine).give("r", labels={"tenant": "a", "epoch": "7"})
    coming = Handoffs(other).reserve(parts[0].name, memoryview(parts[0].data), request_id="r of epoch 8")
    assert coming.offer.labels == {"tenant": "a", "epoch": "7"}
    for name, data in parts[1:]:
        coming.put(name, memoryview(bytearray(data)))
    assert coming.commit() == "r of epoch 8" and other.find("r") is None
    other.abort("r of epoch 8")


@pytest.mark.slow
def test_production_rows(kit, tmp_path):
    """v41-mini has the rows of the full model: 890 bytes a token, 70,752 a ring, blocks of 113,920."""
    from orchestrator.model.load import load_model

    mini = load_model(make_model(v41_mini(), tmp_path / "mini", seed=20))
    door, payloads = handed(kit, mini, 200)
    assert sum(len(p) for n, p in payloads.items() if door.kind(n) == "global") == 2 * 113_920 == 256 * 890
    assert {len(p) for n, p in payloads.items() if n.startswith("window")} == {70_752}
    assert {len(p) for n, p in payloads.items() if n.startswith("tail")} == {28_672}
    request = {"r": (kit.prompt_of(200, 1), greedy(12))}
    expected = kit.run(kit.engine_of(mini, speculation="off"), request)["r"][0]
    for form in ("full", "tokens"):
        one, other = kit.engine_of(mini, mode="in order"), kit.engine_of(mini)
        one.add("r", *request["r"])
        told = [e.token_id for _ in range(3) for e in one.step() if hasattr(e, "token_id")]
        door = Handoffs(one)
        parts = door.give("r", form)
        told += [e.token_id for e in one.take_events() if hasattr(e, "token_id")]
        Handoffs(other).take(parts)
        assert door.conclude("r", taken=True)
        assert told + kit.finish(other)["r"][0] == expected
