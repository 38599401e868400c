from __future__ import annotations

import pytest

from orchestrator.cache.chain import ImageRun
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.service.front.known_prefixes import KnownPrefixes

LONG = list(range(3 * BLOCK_TOKENS + 5))


def served(prefixes, name, prompt, output=(), **options):
    hit = prefixes.begin(name, prompt, **options)
    prefixes.computed(name)
    prefixes.end(name, output)
    return hit


def test_a_prompt_is_known_once_its_first_token_came():
    prefixes = KnownPrefixes()
    assert prefixes.begin("a", LONG) == 0
    assert prefixes.begin("b", LONG) == 0
    prefixes.computed("a")
    assert prefixes.begin("c", LONG) == 3 * BLOCK_TOKENS
    assert prefixes.begin("d", LONG[: 2 * BLOCK_TOKENS + 1]) == 2 * BLOCK_TOKENS
    assert prefixes.begin("e", [7, *LONG]) == 0


@pytest.mark.parametrize("blocks", [1, 2])
def test_at_least_one_token_is_left_to_compute(blocks):
    prefixes = KnownPrefixes()
    prompt = LONG[: blocks * BLOCK_TOKENS]
    served(prefixes, "a", prompt)
    assert prefixes.begin("b", prompt) == (blocks - 1) * BLOCK_TOKENS


def test_a_next_turn_begins_with_the_output():
    prefixes, output = KnownPrefixes(), list(range(500, 500 + BLOCK_TOKENS))
    served(prefixes, "a", LONG, output)
    assert prefixes.begin("b", [*LONG, *output, 1, 2]) == 4 * BLOCK_TOKENS
    served(prefixes, "c", [1, *LONG], output[:2])
    assert prefixes.begin("d", [1, *LONG, *output]) == 3 * BLOCK_TOKENS


def test_requests_that_were_given_up_teach_nothing():
    prefixes = KnownPrefixes()
    prefixes.begin("a", LONG)
    prefixes.end("a")
    prefixes.computed("a")
    assert prefixes.begin("b", LONG) == 0


def test_salts_and_images_are_apart():
    prefixes = KnownPrefixes()
    one, other = (ImageRun(2, 4, bytes([n]) * 32, 28, 28) for n in (1, 2))
    served(prefixes, "a", LONG, salt="x", images=[one])
    assert prefixes.begin("b", LONG, salt="y", images=[one]) == 0
    assert prefixes.begin("c", LONG, salt="x", images=[other]) == 0
    assert prefixes.begin("d", LONG, salt="x") == 0
    assert prefixes.begin("e", LONG, salt="x", images=[one]) == 3 * BLOCK_TOKENS


def test_the_least_recently_used_go_first():
    prefixes = KnownPrefixes(most=4)
    served(prefixes, "a", LONG)
    served(prefixes, "b", [9] * (BLOCK_TOKENS + 1))
    assert prefixes.begin("c", LONG) == 3 * BLOCK_TOKENS  # used again
    served(prefixes, "d", [8] * (BLOCK_TOKENS + 1))
    assert prefixes.begin("e", LONG) == 3 * BLOCK_TOKENS
    assert prefixes.begin("f", [9] * (BLOCK_TOKENS + 1)) == 0
