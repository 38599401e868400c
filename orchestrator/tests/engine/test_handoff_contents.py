"""Parts that are whole and say the wrong thing: every message is checked against itself and against the engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from orchestrator.engine.handoff.messages import Offer, State, decode, encode
from orchestrator.engine.handoff.token_bytes import pack_tokens
from orchestrator.engine.request import GrammarSpec

sys.path.insert(0, str(Path(__file__).parent))
from handoff_kit import Watched, changed, params, parts_of, resealed


@pytest.fixture(scope="module")
def full(kit, nano):
    return parts_of(kit, nano)


@pytest.fixture(scope="module")
def watched(kit, nano):
    return Watched(kit, nano)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_total": 10**6}, "context"), ({"prompt_len": 0}, "state"), ({"prompt_len": 500}, "state"),
        ({"rows": 0}, "state"), ({"rows": 10**5}, "state"), ({"draft_stages": 4}, "state"),
        ({"text": True}, "tokenizer"), ({"pictures": [[1, 2, b"0" * 32, 3, 4]]}, "model"), ({"unheard": 1}, "state"),
        ({"request_id": "1"}, "id"), ({"form": "other"}, "state"), ({"keys": b"0" * 33}, "state"),
        ({"keys": b"0" * 320}, "state"), ({"params": {"temperature": -1}}, "state"),
        ({"params": {"unheard": 1}}, "state"), ({"model": b""}, "model"), ({"layout": b"1" * 32}, "layout"),
        ({"rows": 180}, "room"), ({"handoff": b"x"}, "part"),
    ],
)  # fmt: skip
def test_offers_that_cannot_be_taken(kit, nano, full, fields, reason):
    watched = Watched(kit, nano, num_blocks=6 if reason == "room" else 48)

    def change(payload):
        values = msgspec.msgpack.decode(payload)
        for name, value in fields.items():
            values[name] = {**values[name], **value} if isinstance(value, dict) else value
        return msgspec.msgpack.encode(values)

    watched.refuses(resealed(full, watched, offer=change), reason)
    watched.finish()


@pytest.mark.parametrize(
    "fields",
    [
        {"computed": -1}, {"computed": 10**4}, {"written": 0}, {"written": 10**4}, {"global_floor": -1}, {"hit": 10**4},
        {"encoder_lower": 10**4}, {"decoder_lower": -1}, {"publishable": -1}, {"preemptions": -1}, {"seed": 1 << 63},
        {"prompt_logprobs": [None]}, {"drafts": [1] * 6}, {"matched": 0}, {"stops": [0]}, {"stops": [10**4]},
        {"mode": "canonical"},
    ],
)  # fmt: skip
def test_states_that_contradict_themselves(watched, full, fields):
    watched.refuses(resealed(full, watched, state=changed(State, **fields)), "state", "incomplete")


def test_contents_that_are_nonsense(watched, full):
    for name in ("offer", "state", "manifest"):
        for wrong in (b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03", msgspec.msgpack.encode({"form": "full"})):
            watched.refuses(resealed(full, watched, **{name: lambda _, wrong=wrong: wrong}), "state", "incomplete")
    tokens = pack_tokens(range(151))
    for wrong in (
        b"",
        b"\0" * 3,
        tokens + b"\0",
        pack_tokens([512] * 151),
        pack_tokens([1] * 149),
        pack_tokens([1] * 180),
    ):
        watched.refuses(resealed(full, watched, tokens=lambda _, wrong=wrong: wrong), "state", "size", "incomplete")
    for name in ("rows/4/0/2", "window/3", "tail/4"):
        for size in (-1, 1, 36):
            change = lambda data, size=size: data[:size] if size < 0 else data + bytes(size)  # noqa: E731
            watched.refuses(resealed(full, watched, **{name: change}), "size")


def test_tokenizers_and_grammars_that_differ(kit, nano, tokenizer):
    """Text and grammar have to come to the same point: what waits, and how many tokens were taken."""
    setting = params(3, grammar=GrammarSpec("regex", "[a-z ]{30}"), stop=("never",))
    parts = parts_of(kit, nano, tokenizer=tokenizer, setting=setting)
    Watched(kit, nano).refuses(parts, "tokenizer")
    watched = Watched(kit, nano, tokenizer)
    for fields, reason in (
        ({"held_back": "x"}, "tokenizer"),
        ({"unfinished": b"\xe2"}, "tokenizer"),
        ({"matched": 0}, "state"),
    ):
        watched.refuses(resealed(parts, watched, state=changed(State, **fields)), reason)

    def another(payload):
        offer = decode(payload, Offer)
        grammar = GrammarSpec("regex", "[0-9]{30}")
        return encode(msgspec.structs.replace(offer, params=replace(offer.params, grammar=grammar)))

    watched.refuses(resealed(parts, watched, offer=another), "state")
    ended = {"stop": ("a",) * 1 + tuple("bcdefghijklmno")}
    change = lambda p: encode(msgspec.structs.replace(decode(p, Offer), params=replace(setting, **ended)))  # noqa: E731
    watched.refuses(resealed(parts, watched, offer=change), "state", "tokenizer")
    assert watched.door.take(parts) == "r"
