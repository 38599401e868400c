"""Needles: where they stand, that they are asked for, and that lengths are kept."""

import random
import re

import pytest

from orchestrator.corpus.encode import TextEncoder
from orchestrator.corpus.heldout import heldout_texts
from orchestrator.corpus.retrieval import LONGEST, needle_prompt, retrieval_document
from orchestrator.text import bundled_tokenizer


@pytest.fixture(scope="module")
def count():
    return TextEncoder(bundled_tokenizer("v41-mini")).count


@pytest.fixture(scope="module")
def filler():
    return [text for name, text in heldout_texts() if len(text) > 5000]


@pytest.mark.parametrize("tokens", [64, 256, 3000])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_prompt(count, filler, tokens, depth):
    prompt, answer = needle_prompt(random.Random(1), tokens, depth, filler=filler, count=count)
    assert re.fullmatch(r"\d{6}", answer)
    assert prompt.count(answer) == 1 and f'= "{answer}"\n' in prompt
    name = re.search(rf'(ACCESS_CODE_\w+) = "{answer}"', prompt)[1]
    assert prompt.endswith(f'\n\nassert {name} == "')
    assert tokens - 60 <= count(prompt) <= 1.02 * tokens + 2, "short by less than a line"
    lines = prompt.split("\n\nassert " + name)[0].split("\n")
    place = next(i for i, line in enumerate(lines) if answer in line)
    assert abs(place - depth * (len(lines) - 1)) <= 1


def test_the_answer_starts_a_token_of_its_own(count, filler):
    tokenizer = bundled_tokenizer("v41-mini")
    prompt, answer = needle_prompt(random.Random(2), 300, 0.3, filler=filler, count=count)
    ids = tokenizer.encode(prompt + answer + '"\n')
    assert ids[: len(tokenizer.encode(prompt))] == tokenizer.encode(prompt)


def test_by_default_it_is_between_held_out_modules(count):
    filler = [text for name, text in heldout_texts() if name.startswith("python/")]
    given = needle_prompt(random.Random(7), 500, 0.5, filler=filler, count=count)
    assert needle_prompt(random.Random(7), 500, 0.5) == given


@pytest.mark.parametrize(("tokens", "depth", "name"), [(63, 0.5, "tokens"), (100, 1.1, "depth"), (100, -0.1, "depth")])
def test_bad_arguments_are_named(count, filler, tokens, depth, name):
    with pytest.raises(ValueError, match=rf"^{name}: got"):
        needle_prompt(random.Random(0), tokens, depth, filler=filler, count=count)


def test_every_value_asked_for_stands_above(count, filler):
    sizes, asked = [], []
    for seed in range(25):
        text = retrieval_document(random.Random(seed), filler, count)
        above, _, questions = text.rpartition("\n\n")
        values = re.findall(r"(?<!\d)\d{6}(?!\d)", questions)
        assert 1 <= len(values) <= 8
        assert all(value in above for value in values)
        sizes.append(count(text))
        asked.append(len(values))
    assert min(sizes) < 1000 < 4000 < max(sizes) <= LONGEST * 1.02
    assert len(set(asked)) > 3


def test_the_same_seed_makes_the_same_document(count, filler):
    first, again, other = (retrieval_document(random.Random(seed), filler, count) for seed in (3, 3, 4))
    assert first == again != other
