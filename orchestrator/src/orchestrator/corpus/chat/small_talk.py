"""Greetings, questions about the model itself, and first questions about Python."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from orchestrator.corpus.chat.exchange import Exchange
from orchestrator.corpus.words import NAMES

_FILE = Path(__file__).parent / "small_talk.txt"
_FIRST = 14  # senses at the beginning of the file: greetings and the model itself, asked more often than the rest


@cache
def pairs() -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Questions and answers of each sense, as the file has them."""
    lines = [line for line in _FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    split = [tuple(part.replace("\\n", "\n") for part in line.split("|")) for line in lines]
    return tuple(zip(split[::2], split[1::2], strict=True))


def small_talk(rng: random.Random) -> Exchange:
    """One question and one of its answers."""
    if rng.random() < 0.1:
        return _name(rng)
    questions, answers = rng.choice(pairs()[:_FIRST] if rng.random() < 0.5 else pairs())
    return Exchange(_varied(rng, rng.choice(questions)), rng.choice(answers))


def _name(rng: random.Random) -> Exchange:
    name = rng.choice(NAMES)
    question = rng.choice(
        (f"Hi, I am {name}.", f"My name is {name}.", f"Hello, this is {name}.", f"I'm {name}. And you?")
    )
    answer = rng.choice(
        (
            f"Hello {name}! I am v41-mini.",
            f"Hi {name}, I am v41-mini. How can I help you?",
            f"Nice to meet you, {name}. I am Fathom's small demonstration model, v41-mini.",
        )
    )
    return Exchange(question, answer)


def _varied(rng: random.Random, question: str) -> str:
    """The same question as people also type it."""
    chance = rng.random()
    if chance < 0.08:
        return question.lower()
    if chance < 0.14:
        return question.rstrip("?.!")
    if chance < 0.2:
        return rng.choice(("Hi! ", "Please: ", "Quick question: ", "Hello. ", "One more thing. ")) + question
    return question
