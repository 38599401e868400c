"""The SDKs that people use get from the service of several processes what they get from one."""

from __future__ import annotations

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

import sdk_calls

GREEDY = {"extra_body": {"temperature": 0.0}}  # one of the SDKs knows no such argument any more
SEEDED = {"extra_body": {"temperature": 1.0, "seed": 7}}


@pytest.mark.parametrize("call", [sdk_calls.chat, sdk_calls.responses, sdk_calls.messages])
@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_and_streams(reference, park, call, options):
    expected, got = call(reference.park.url, **options), call(park.url, **options)
    for one in (expected, got):
        one.pop("cached", None)
    assert got == expected


@pytest.mark.parametrize(
    ("call", "answer", "choice"),
    [
        (sdk_calls.chat_tool_call, sdk_calls.chat_tool_answer, "required"),
        (sdk_calls.messages_tool_call, sdk_calls.messages_tool_answer, {"type": "any"}),
    ],
)
def test_tool_round_trips(reference, park, call, answer, choice):
    """What a small model says to the result is anything; it has to be the same."""
    told = []
    for url in (reference.park.url, park.url):
        message, arguments = call(url, tool_choice=choice, **GREEDY)
        told.append((arguments, answer(url, message, **GREEDY)))
    assert told[0] == told[1]


def test_structured_output(reference, park):
    assert sdk_calls.structured(park.url, **GREEDY) == sdk_calls.structured(reference.park.url, **GREEDY)


def test_refusals(reference, park):
    assert sdk_calls.refusals(park.url) == sdk_calls.refusals(reference.park.url)
    assert len(sdk_calls.refusals(park.url)) == 2
