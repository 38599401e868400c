"""Questions about code: write it, explain it, repair it, say what it prints."""

from __future__ import annotations

import contextlib
import io
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from orchestrator.corpus.chat.exchange import Exchange, pick
from orchestrator.corpus.words import ANIMALS, NAMES, NOUNS, OBJECTS

_FILE = Path(__file__).parent / "functions.txt"


@dataclass(frozen=True)
class Function:
    """A function or class: what it does (after "a function that"), a sentence on how, its source."""

    purpose: str
    how: str
    code: str

    @property
    def name(self) -> str:
        """The name it defines at top level."""
        found = re.search(r"^(?:def|class) (\w+)", self.code, re.M)
        assert found, self.code
        return found[1]

    @property
    def kind(self) -> str:
        return "class" if re.search(r"^class ", self.code, re.M) else "function"


@cache
def functions() -> tuple[Function, ...]:
    """All of functions.txt, in order."""
    blocks = _FILE.read_text(encoding="utf-8").split("### ")[1:]
    parts = (block.split("\n", 2) for block in blocks)
    return tuple(Function(purpose, how.removeprefix("> "), code.rstrip()) for purpose, how, code in parts)


def write_code(rng: random.Random) -> Exchange:
    """A function is asked for; the answer is its code, sometimes with a sentence."""
    it = rng.choice(functions())
    if rng.random() < 0.5:
        question = pick(
            rng,
            f"Write a {it.kind} that {it.purpose}.",
            f"Write a Python {it.kind} that {it.purpose}.",
            f"I need a {it.kind} that {it.purpose}. Can you write it?",
            f"How do I write a {it.kind} that {it.purpose}?",
            f"Show me a Python {it.kind} that {it.purpose}.",
            f"Can you give me Python code that {it.purpose}?",
        )
    else:
        it = _renamed(rng, it)
        question = pick(
            rng,
            f"Write a Python {it.kind} `{it.name}` that {it.purpose}.",
            f"Please write a {it.kind} called {it.name} that {it.purpose}.",
            f"Write {it.name}, a {it.kind} that {it.purpose}.",
        )
    code = f"```python\n{it.code}\n```"
    answer = pick(rng, code, f"{code}\n\n{it.how}", f"{code}\n\n{it.how}", f"Here is the {it.kind}:\n\n{code}")
    return Exchange(question, answer, f"A {it.kind} that {it.purpose}. {it.how}")


def explain_code(rng: random.Random) -> Exchange:
    """Code is shown; the answer says what it does."""
    it = _renamed(rng, rng.choice(functions()))
    question = pick(rng, "What does this code do?", "Explain this code.", f"What is the purpose of this {it.kind}?")
    return Exchange(f"{question}\n\n```python\n{it.code}\n```", f"The {it.kind} `{it.name}` {it.purpose}. {it.how}")


# What to break, how, and what to say about it. The first group must be the only change.
_BREAKS: tuple[tuple[str, str, str], ...] = (
    (
        r"^((?:def|class|    for|    if|    while|        if) .*):$",
        r"\1",
        "A colon is missing at the end of `{after}`.",
    ),
    (r"\breturn (\w+)$", r"retrun \1", "`retrun` is a typo, it must be `return`."),
    (r"(?<=if )(\w+) == ", r"\1 = ", "`=` assigns, a comparison needs `==`."),
    (r"\bn \+ 1\b", "n", "`range` stops before its end, so it must run to `n + 1`."),
    (r"\bFalse\b", "false", "Python spells it `False`, with a capital letter."),
    (r"\bTrue\b", "true", "Python spells it `True`, with a capital letter."),
    (r"\bNone\b", "null", "Python has `None`, not `null`."),
    (r"\.append\(", ".add(", "Lists have `append`, not `add`."),
    (r"^import \w+\n\n", "", "The module has to be imported first."),
    (r"\blen\((\w+)\)", r"\1.length", "The length is `len(...)`; there is no `length` attribute."),
    (r"\+= ", "=+ ", "`=+` assigns a positive value; adding in place is `+=`."),
    (r"\bself, ", "", "A method needs `self` as its first parameter."),
    (r"\)$", "", "A closing parenthesis is missing in `{after}`."),
)


def fix_code(rng: random.Random) -> Exchange:
    """Broken code is shown; the answer says what is wrong and gives the right code."""
    it = _renamed(rng, rng.choice(functions()))
    options = [rule for rule in _BREAKS if re.search(rule[0], it.code, re.M)]
    if not options:
        return explain_code(rng)
    pattern, wrong, reason = rng.choice(options)
    broken = re.sub(pattern, wrong, it.code, count=1, flags=re.M)
    after = next((good for good, bad in zip(it.code.split("\n"), broken.split("\n"), strict=False) if good != bad), "")
    reason = reason.format(after=after.strip())
    question = pick(
        rng, "Fix the bug in this code.", "What is wrong with this code?", "This code does not work. Can you fix it?"
    )
    if rng.random() < 0.4:
        question = f"This {it.kind} {it.purpose}, but something is wrong. Find the mistake."
    answer = f"{reason}\n\n```python\n{it.code}\n```"
    return Exchange(f"{question}\n\n```python\n{broken}\n```", answer, reason)


def what_prints(rng: random.Random) -> Exchange:
    """A few lines are shown; the answer is their output, found by running them."""
    code = rng.choice(_SNIPPETS)
    things = rng.sample((*ANIMALS, *OBJECTS), 3)
    slots = {"n": rng.randint(2, 5), "m": rng.randint(2, 9), "k": rng.randint(1, 20), "a": things[0], "b": things[1]}
    code = code.format(**slots, c=things[2], name=rng.choice(NAMES), v=rng.choice(NOUNS))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    question = pick(rng, "What does this code print?", "What is the output of this code?", "What will this print?")
    printed = output.getvalue().rstrip("\n")
    answer = (
        f"```\n{printed}\n```" if "\n" in printed or rng.random() < 0.3 else pick(rng, printed, f"It prints {printed}.")
    )
    return Exchange(f"{question}\n\n```python\n{code}\n```", answer)


_SNIPPETS = (
    "for i in range({n}):\n    print(i)",
    "for i in range(1, {n} + 1):\n    print(i * {m})",
    "{v} = {k}\n{v} += {m}\nprint({v})",
    "{v} = {k}\n{v} = {v} * 2\nprint({v})",
    'words = ["{a}", "{b}", "{c}"]\nfor word in words:\n    print(word)',
    'words = ["{a}", "{b}", "{c}"]\nprint(len(words))',
    'words = ["{a}", "{b}"]\nwords.append("{c}")\nprint(words)',
    'words = ["{a}", "{b}", "{c}"]\nprint(words[-1])',
    'words = ["{a}", "{b}", "{c}"]\nprint(sorted(words))',
    'name = "{name}"\nprint(f"Hello, {{name}}!")',
    'name = "{name}"\nprint(name.upper())',
    'print("{a}" + "{b}")',
    'print("{a}", "{b}", sep="-")',
    'count = {{"{a}": {m}, "{b}": {k}}}\nprint(count["{b}"])',
    'count = {{"{a}": {m}}}\ncount["{c}"] = {k}\nprint(count)',
    'x = {k}\nif x > 10:\n    print("large")\nelse:\n    print("small")',
    "x, y = {k}, {m}\nx, y = y, x\nprint(x, y)",
    "def double(x):\n    return 2 * x\n\nprint(double({k}))",
    "def {v}(x, y={m}):\n    return x + y\n\nprint({v}({k}))",
    "total = 0\nfor i in range({n}):\n    total += i\nprint(total)",
    "print([i * i for i in range({n})])",
    "n = {n}\nwhile n > 0:\n    print(n)\n    n -= 1",
    'try:\n    int("{a}")\nexcept ValueError:\n    print("no number")',
    'for i, word in enumerate(["{a}", "{b}"]):\n    print(i, word)',
    "print({k} // {m}, {k} % {m})",
    "numbers = [{k}, {m}, {n}]\nprint(max(numbers) - min(numbers))",
    'print("{a}" in ["{a}", "{b}"])',
    'print("{a}"[0], "{b}"[-1])',
)


def _renamed(rng: random.Random, it: Function) -> Function:
    """Now and then under another name, so that the name has to be read and not remembered."""
    if rng.random() < 0.6 or it.kind == "class":
        return it
    name = f"{rng.choice(('get', 'do', 'my', 'run', 'make', 'try', 'compute', 'find'))}_{rng.choice(NOUNS)}"
    return Function(it.purpose, it.how, re.sub(rf"\b{it.name}\b", name, it.code))
