"""Whatever is short, changed, foreign, twice, out of order or without room is refused, and nobody notices it."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.cache.block_object import HEADER_BYTES
from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.handoff.parts import HandoffRefused, handoff_of, number_of

sys.path.insert(0, str(Path(__file__).parent))
from handoff_kit import Watched, flipped, params, parts_of


@pytest.fixture(scope="module")
def full(kit, nano):
    return parts_of(kit, nano)


@pytest.fixture(scope="module")
def watched(kit, nano):
    return Watched(kit, nano)


def test_every_part_is_there(nano, full):
    layers, stages = nano.config.num_hidden_layers, nano.config.num_nextn_predict_layers
    assert [name for name, _ in full] == [
        "offer", "rows/2/0/2", "rows/4/0/2", "rows/6/0/2", *(f"window/{n}" for n in range(layers + stages)),
        "tail/2", "tail/4", "tokens", "state", "manifest",
    ]  # fmt: skip


def test_any_bit_of_any_part(watched, full):
    """Header bits all, some of the bytes behind: caught where the part comes, before it is put anywhere."""
    rng = random.Random(1)
    names = set()
    for number, (name, data) in enumerate(full):
        kind = name.split("/")[0]
        bits = set(range(HEADER_BYTES * 8)) if kind not in names else set(rng.sample(range(HEADER_BYTES * 8), 8))
        bits |= set(rng.sample(range(HEADER_BYTES * 8, len(data) * 8), 24))
        names.add(kind)
        coming = None
        for part in full[:number]:
            coming = watched.door.reserve(*part) if coming is None else coming.put(*part) or coming
        for bit in bits:
            with pytest.raises(HandoffRefused):
                if coming is None:
                    watched.door.reserve(name, flipped(data, bit)).cancel()
                else:
                    coming.put(name, flipped(data, bit))
        assert coming is None or coming.received == number
        if coming is not None:
            coming.put(name, data)  # the part itself is still welcome
            coming.cancel()
    watched.unchanged()


def test_short_long_and_empty_parts(watched, full):
    rng = random.Random(2)
    for number, (name, data) in enumerate(full):
        for cut in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(data) - 1, rng.randrange(len(data))):
            watched.refuses([*full[:number], (name, data[:cut]), *full[number + 1 :]], "short")
        watched.refuses([*full[:number], (name, data + b"\0"), *full[number + 1 :]], "size")


def test_missing_doubled_and_swapped_parts(watched, full):
    for number in range(len(full)):
        watched.refuses(full[:number] + full[number + 1 :], "order", "magic", "layout", "part", "incomplete")
        watched.refuses(full[: number + 1] + full[number:], "order", "part", "key")
        watched.refuses(full[:number], "incomplete")
    for one in (2, 5, 8):  # neighbours of one kind, each of which would find its place
        watched.refuses([*full[:one], full[one + 1], full[one], *full[one + 2 :]], "order")
    order = list(full)
    rng = random.Random(3)
    for _ in range(20):
        one, other = sorted(rng.sample(range(len(full)), 2))
        order[one], order[other] = order[other], order[one]
        if order != list(full):
            watched.refuses(order)
    for name in ("window/1", "rows/2/0/2", "nothing", "window/x", "window/01", "rows/2", "tail/6"):
        renamed = list(full)
        renamed[4] = (name, full[4][1])
        watched.refuses(renamed, "key")
    assert [number_of(data) for _, data in full] == list(range(len(full)))


def test_parts_of_another_handoff_of_the_same_request(kit, nano, watched, full):
    other = parts_of(kit, nano)
    assert [len(d) for _, d in other] == [len(d) for _, d in full] and handoff_of(other[0][1]) != handoff_of(full[0][1])
    for number in range(1, len(full)):
        watched.refuses([*full[:number], other[number], *full[number + 1 :]], "key")


def test_other_models_and_layouts(kit, nano, nano7, watched, tmp_path):
    from orchestrator.model.load import load_model
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    stranger = load_model(make_model(v41_nano(), tmp_path / "stranger", seed=21))
    watched.refuses(parts_of(kit, stranger), "model")
    watched.refuses(parts_of(kit, nano7), "model")
    watched.refuses(parts_of(kit, nano, quantised_caches=False), "layout")
    named = kit.engine_of(nano, speculation=3)
    named.add("r", [1, 2, 3], params(1))
    named.step()
    watched.refuses(Handoffs(named, name=b"a fine-tuned one").give("r"), "model")


def test_the_receiver_goes_on_and_then_takes_it(kit, nano, watched, full):
    """After all that: the parts themselves are taken, and everybody's tokens are right."""
    watched.unchanged()
    expected = kit.run(kit.engine_of(nano, speculation="off"), {"r": (kit.prompt_of(150, 1), params(1))})["r"][0]
    fresh = Watched(kit, nano)
    assert fresh.door.take(full) == "r"
    fresh.tokens["r"] = []
    taken = len(fresh.engine.find("r").tokens) - 150
    fresh.expected["r"] = (expected[taken:],)
    fresh.finish()
    watched.finish()


def test_without_room(kit, nano):
    """No slot, no block, somebody parked, an id on its way: refused at the offer, with nothing taken."""
    parts = parts_of(kit, nano)
    for options in ({"max_num_seqs": 2}, {"num_blocks": 5}):
        watched = Watched(kit, nano, **options)
        watched.refuses(parts, "room")
        watched.finish()
        watched.tokens["r"] = []
        assert watched.door.take(parts) == "r"  # now there is
        watched.expected["r"] = (watched.tokens["r"],)
        watched.finish()
    watched = Watched(kit, nano)
    coming = watched.door.reserve(*parts[0])
    with pytest.raises(HandoffRefused, match="on its way already"):
        watched.door.reserve(*parts[0])
    other = watched.door.reserve(*parts[0], request_id="another")
    for incoming in (coming, other):
        assert watched.state() != watched.before
        incoming.cancel()
    watched.unchanged()
    with pytest.raises(HandoffRefused) as error:
        coming.put(*parts[1])
    assert error.value.reason == "ended"
    waiting = kit.engine_of(nano, max_waiting=1, max_num_seqs=1)
    waiting.add("first", [1], params(1))
    with pytest.raises(HandoffRefused, match="waiting already"):
        Handoffs(waiting).take(parts_of(kit, nano, "tokens"))


def test_an_id_that_comes_into_use_meanwhile(kit, nano):
    parts = parts_of(kit, nano)
    engine = kit.engine_of(nano)
    coming = Handoffs(engine).reserve(*parts[0])
    for part in parts[1:]:
        coming.put(*part)
    engine.add("r", [1, 2, 3], params(5))
    with pytest.raises(HandoffRefused, match="ids have to be unique"):
        coming.commit()
    assert coming.open and coming.complete
    coming.cancel()
    expected = kit.run(kit.engine_of(nano), {"r": ([1, 2, 3], params(5))})["r"][0]
    assert kit.finish(engine)["r"][0] == expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_history_of_parts(watched, full, data):
    """Parts in any order, some changed, some twice: only the next one, whole, is ever taken."""
    before = watched.state()
    coming = watched.door.reserve(*full[0])
    try:
        for _ in range(data.draw(st.integers(0, 30))):
            number = data.draw(st.one_of(st.just(coming.received), st.integers(0, len(full) - 1)))
            name, part = full[min(number, len(full) - 1)]
            change = data.draw(st.sampled_from(["none", "none", "flip", "cut", "name"]))
            if change == "flip":
                part = flipped(part, data.draw(st.integers(0, len(part) * 8 - 1)))
            elif change == "cut":
                part = part[: data.draw(st.integers(0, len(part) - 1))]
            elif change == "name":
                name = data.draw(st.sampled_from([n for n, _ in full if n != name]))
            good = change == "none" and number == coming.received < len(full)
            try:
                coming.put(name, part)
                assert good
            except HandoffRefused:
                assert not good
        assert coming.complete == (coming.received == len(full))
    finally:
        coming.cancel()
    assert watched.state() == before
