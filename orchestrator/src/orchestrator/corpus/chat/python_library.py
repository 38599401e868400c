"""Questions about the standard library, answered from its own docstrings and signatures."""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from orchestrator.corpus import heldout
from orchestrator.corpus.chat.exchange import Exchange, pick

# None of the held-out modules: what their docstrings say would be known from here.
MODULES = tuple((Path(__file__).parent / "modules.txt").read_text(encoding="utf-8").split())
_HELDOUT = frozenset(name.removesuffix(".py").replace("/", ".") for name in heldout.MODULES)
"""What is held out but can be had from one of the above, as asyncio.Queue can."""
_BUILTINS = ("str", "list", "dict", "set", "tuple", "int", "float", "bytes", "frozenset", "bytearray")


@dataclass(frozen=True)
class Entry:
    """A documented function, class or method: full name, first sentence of its docstring, signature or ""."""

    name: str
    summary: str
    signature: str
    kind: str


@cache
def entries() -> tuple[Entry, ...]:
    """All that is found here, sorted by name, one a summary and name."""
    found = {entry.name: entry for entry in _entries()}
    return tuple(found[name] for name in sorted(found))


def library(rng: random.Random) -> Exchange:
    """One question about one entry."""
    it = rng.choice(entries())
    module, _, short = it.name.rpartition(".")
    kinds = [_what, _what, _which]
    if it.signature:
        kinds += [_signature]
    if module and not module.endswith(_BUILTINS) and it.kind != "method":
        kinds += [_import]
    return rng.choice(kinds)(rng, it, module, short)


def _what(rng: random.Random, it: Entry, module: str, short: str) -> Exchange:
    question = pick(
        rng,
        f"What does {it.name} do?",
        f"What is {it.name}?",
        f"Explain {it.name}.",
        f"What is the {it.kind} {it.name} for?",
        f"What does the {it.kind} `{it.name}` do in Python?",
        f"Tell me about {it.name} in Python.",
    )
    answer = it.summary
    if it.signature and rng.random() < 0.4:
        answer = f"{answer}\n\n```python\n{it.name}{it.signature}\n```"
    return Exchange(question, answer, f"{it.name} is a {it.kind}{f' of {module}' if module else ''}.")


def _which(rng: random.Random, it: Entry, module: str, short: str) -> Exchange:
    summary = it.summary.rstrip(".")
    question = pick(
        rng,
        f'Which Python {it.kind} has the description "{summary}"?',
        f"Which {it.kind} of the standard library is this: {summary}?",
    )
    return Exchange(question, pick(rng, it.name, f"`{it.name}`", f"That is `{it.name}`."))


def _signature(rng: random.Random, it: Entry, module: str, short: str) -> Exchange:
    question = pick(rng, f"What arguments does {it.name} take?", f"What is the signature of {it.name}?")
    return Exchange(question, f"`{it.name}{it.signature}`")


def _import(rng: random.Random, it: Entry, module: str, short: str) -> Exchange:
    question = pick(rng, f"How do I import {short} from {module}?", f"Which import do I need for {module}.{short}?")
    return Exchange(question, f"```python\nfrom {module} import {short}\n```")


def _entries() -> Iterator[Entry]:
    for name in sorted(dir(importlib.import_module("builtins"))):
        yield from _entry(name, getattr(importlib.import_module("builtins"), name), "")
    for owner in _BUILTINS:
        kind = getattr(importlib.import_module("builtins"), owner)
        for name in sorted(vars(kind)):
            yield from _entry(f"{owner}.{name}", getattr(kind, name), "method")
    for module in MODULES:
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            continue
        for name in sorted(getattr(loaded, "__all__", None) or dir(loaded)):
            value = getattr(loaded, name, None)
            home = getattr(value, "__module__", None) or module
            if home in _HELDOUT:
                continue
            if home.split(".")[0].lstrip("_") not in (module.split(".")[0], "posixpath", "posix", "io"):
                continue
            yield from _entry(f"{module}.{name}", value, "")
            if inspect.isclass(value):
                for method in sorted(vars(value)):
                    yield from _entry(f"{module}.{name}.{method}", getattr(value, method, None), "method")


def _entry(name: str, value: object, kind: str) -> Iterator[Entry]:
    if name.rpartition(".")[2].startswith("_") or not callable(value):
        return
    summary = _summary(inspect.getdoc(value) or "")
    inherited = inspect.isclass(value) and not vars(value).get("__doc__")
    if not summary or inherited:
        return
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        signature = ""
    if len(signature) > 120 or " at 0x" in signature or "<" in signature:
        signature = ""
    yield Entry(name, summary, signature, kind or ("class" if inspect.isclass(value) else "function"))


def _summary(doc: str) -> str:
    """The first paragraph as one line, if it is a sentence of ordinary length, or ""."""
    paragraphs = [" ".join(part.split()) for part in doc.split("\n\n")]
    paragraphs = [part for part in paragraphs if not re.match(r"[\w.]+\(.*\)( ->.*)?$", part)]
    text = paragraphs[0] if paragraphs else ""
    text = re.sub(r"^[\w.]+\([^)]*\)( -> [\w \[\],]+)?( --?|:)? ", "", text)
    sentence = re.match(r".*?[.](?= [A-Z]|$)", text)
    text = sentence[0] if sentence else text + "."
    good = 15 <= len(text) <= 200 and text[0].isupper() and text.isascii() and ":." not in text and ">>>" not in text
    return text if good else ""
