"""What the templates yield: questions with answers, and conversations with tools or an answer format."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Exchange:
    """One question and its answer. `thought` is a short reasoning, empty where there is nothing to think about."""

    question: str
    answer: str
    thought: str = ""


@dataclass(frozen=True)
class Call:
    """A call of a tool with its arguments, and what the tool returns."""

    name: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True)
class Tool:
    """A tool as the model is told of it. `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One turn of the user and what follows: calls, if any, made together, then the answer."""

    question: str
    answer: str
    thought: str = ""
    calls: tuple[Call, ...] = ()
    last_thought: str = ""
    """Thought between the results of the calls and the answer."""


@dataclass(frozen=True)
class Chat:
    """A whole conversation. `schema` asks for an answer in JSON: a schema, or {} for any object."""

    steps: tuple[Step, ...]
    system: str = ""
    thinking: bool = False
    tools: tuple[Tool, ...] = ()
    schema: dict[str, Any] | None = field(default=None)


Template = Callable[[random.Random], Exchange]


def pick(rng: random.Random, *options: str) -> str:
    """One of the options."""
    return rng.choice(options)
