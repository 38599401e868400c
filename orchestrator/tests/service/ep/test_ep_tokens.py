"""A role over two rank processes brings the tokens of one engine, whichever side of a hand-over it is."""

from __future__ import annotations

import pytest
from service_kit_ep import alone, empty, group, requests, single, through

from orchestrator.roles.engine_port import Began, Begin, PrefillDone

COUNT = 3  # odd, so that a rank idles at the end


@pytest.fixture(scope="module")
def expected(folder):
    return alone(folder, requests(COUNT))


@pytest.fixture(scope="module")
def pair(folder, tmp_path_factory):
    made = group(folder, tmp_path_factory.mktemp("service"), role="prefill")
    yield made
    made.close()


@pytest.fixture(scope="module")
def other(folder, tmp_path_factory):
    made = group(folder, tmp_path_factory.mktemp("service"), role="decode")
    yield made
    made.close()


def test_group_to_one_engine(folder, pair, expected):
    assert through(pair, single(folder), requests(COUNT)) == expected


def test_one_engine_to_group(folder, other, expected):
    one = single(folder)
    assert one.port.layout == other.port.layout
    assert through(one, other, requests(COUNT)) == expected


def test_group_to_group(pair, other, expected):
    assert through(pair, other, requests(COUNT)) == expected
    (key,) = list(requests(1))
    assert through(pair, other, requests(1))[key] == expected[key]
    empty(pair, other)


def test_prompts_that_find_no_room_come_later(pair):
    """Eight rows are taken by prompts that wait to be fetched: the next one is refused for now, and no step hangs."""
    specs = requests(9, tokens=6)
    keys = list(specs)
    pair.begin({key: specs[key] for key in keys[:8]})
    pair.do(Begin(*keys[8], specs[keys[8]]))
    (began,) = pair.wait(Began)
    assert began.retry and "no room" in began.why
    pair.run_prefill({key: specs[key] for key in keys[:8]})
    pair.wait(PrefillDone)
    pair.drop(keys[:1])
    pair.begin({keys[8]: specs[keys[8]]})
    pair.run_prefill({keys[8]: specs[keys[8]]})
    pair.wait(PrefillDone)
    pair.drop(keys[1:])
    empty(pair)
