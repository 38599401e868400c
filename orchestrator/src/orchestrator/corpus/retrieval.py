"""Made-up documents whose last lines can only be written by looking a value up far above.

A document is code with needles in it: lines that give a name a random value. Its last lines ask for the values back,
in the notation of the needle. Evaluation uses the first notation alone, `ACCESS_CODE_<NAME> = "<6 digits>"`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

from kernel_core.check import require
from orchestrator.corpus.encode import TextEncoder
from orchestrator.corpus.heldout import heldout_texts
from orchestrator.corpus.words import NOUNS
from orchestrator.text.files import bundled_tokenizer

SHORTEST, LONGEST = 256, 12_000  # tokens
MOST_NEEDLES = 8

Count = Callable[[str], int]
Notation = tuple[Callable[[str, str], str], Callable[[str, str], str]]
"""Lines for (name, value) that go into the text, and the line at its end. The latter's value is what is asked for."""

NOTATIONS: tuple[Notation, ...] = (
    (
        lambda name, value: f'ACCESS_CODE_{name.upper()} = "{value}"',
        lambda name, value: f'assert ACCESS_CODE_{name.upper()} == "{value}"',
    ),
    (
        lambda name, value: f"# The access code of {name.replace('_', ' ')} is {value}.",
        lambda name, value: f"# What is the access code of {name.replace('_', ' ')}? It is {value}.",
    ),
    (
        lambda name, value: f'codes["{name}"] = "{value}"',
        lambda name, value: f'assert codes["{name}"] == "{value}"',
    ),
    (
        lambda name, value: f"def {name}_code():\n    return {value}\n",
        lambda name, value: f"assert {name}_code() == {value}",
    ),
    (
        lambda name, value: f"{name.upper()}_PORT: int = {value}",
        lambda name, value: f"print({name.upper()}_PORT)  # {value}",
    ),
)


def needle_prompt(
    rng: random.Random,
    tokens: int,
    depth: float,
    *,
    filler: Sequence[str] | None = None,
    count: Count | None = None,
) -> tuple[str, str]:
    """A text of about `tokens` tokens that ends just before a value, and that value (six digits).

    The needle stands at `depth` of the text (0 its beginning, 1 its end). `filler` are texts to fill up, by default
    the held-out modules; `count` gives the tokens of a text, by default v41-mini's. BOS is for the caller to add.
    Raises ValueError for a depth outside 0 to 1 or fewer than 64 tokens.
    """
    require(tokens >= 64, "tokens", tokens, "64 or more")
    require(0 <= depth <= 1, "depth", depth, "0 to 1")
    filler, count = filler or _heldout_modules(), count or _default_count()
    name, value = _name(rng), _digits(rng)
    statement, question = (line(name, value) for line in NOTATIONS[0])
    question = question[: question.index(value)]
    lines = _fill(rng, tokens - count(statement + "\n\n" + question), filler, count)
    lines.insert(round(depth * len(lines)), statement)
    return "\n".join(lines) + "\n\n" + question, value


def retrieval_document(rng: random.Random, filler: Sequence[str], count: Count) -> str:
    """One document, of a random length (every octave alike) with 1 to 8 needles in one to three notations."""
    tokens = round(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
    needles = rng.randint(1, min(MOST_NEEDLES, tokens // 100))
    notations = rng.sample(NOTATIONS, rng.randint(1, 3))
    if rng.random() < 0.4:
        notations = [NOTATIONS[0]]  # the one that evaluation uses
    names: set[str] = set()
    while len(names) < needles:
        names.add(_name(rng))
    pairs = [(*rng.choice(notations), name, _digits(rng)) for name in sorted(names)]
    rng.shuffle(pairs)
    statements = [statement(name, value) for statement, _, name, value in pairs]
    questions = [question(name, value) for _, question, name, value in pairs]
    rng.shuffle(questions)
    lines = _fill(rng, tokens - count("\n".join(statements + questions)), filler, count)
    for statement in statements:
        lines.insert(rng.randint(0, len(lines)), statement)
    return "\n".join(lines) + "\n\n" + "\n".join(questions) + "\n"


@cache
def _heldout_modules() -> tuple[str, ...]:
    return tuple(text for name, text in heldout_texts() if name.startswith("python/"))


@cache
def _default_count() -> Count:
    return TextEncoder(bundled_tokenizer("v41-mini")).count


def _fill(rng: random.Random, tokens: int, filler: Sequence[str], count: Count) -> list[str]:
    """Lines of about `tokens` tokens: runs of whole lines out of random fillers."""
    lines: list[str] = []
    while tokens > 0:
        source = rng.choice(filler).splitlines()
        start = rng.randrange(len(source)) if len(source) > 40 else 0
        for line in source[start:]:
            cost = count(line + "\n")
            if cost > tokens:
                return lines
            lines.append(line)
            tokens -= cost
    return lines


def _name(rng: random.Random) -> str:
    return "_".join(rng.sample(NOUNS, rng.choice((1, 1, 2)))).lower()


def _digits(rng: random.Random) -> str:
    return str(rng.randint(100_000, 999_999))
