"""Small tasks on words and on Python expressions, with computed answers."""

from __future__ import annotations

import random
from collections.abc import Callable

from orchestrator.corpus.chat.exchange import Exchange, pick
from orchestrator.corpus.words import ADJECTIVES, ANIMALS, CITIES, COLOURS, JOBS, NAMES, NOUNS, OBJECTS

_ALL = tuple(sorted({*ANIMALS, *OBJECTS, *COLOURS, *NOUNS, *ADJECTIVES, *JOBS}))
_ORDINALS = ("first", "second", "third", "fourth", "fifth")


def strings(rng: random.Random) -> Exchange:
    """One task on a word or a few of them."""
    kinds = (
        _spell,
        _count,
        _reverse,
        _case,
        _length,
        _letter,
        _sort,
        _longest,
        _join,
        _repeat,
        _odd_one,
        _first_letters,
    )
    return rng.choice(kinds)(rng)


def evaluate(rng: random.Random) -> Exchange:
    """The value of a Python expression."""
    expression = rng.choice(_EXPRESSIONS)(rng)
    value = repr(eval(expression, {}))
    question = pick(
        rng,
        f"What does {expression} return?",
        f"What is the value of {expression}?",
        f"Evaluate this Python expression: {expression}",
        f"In Python, what is {expression}?",
        f"What is the result of `{expression}`?",
    )
    return Exchange(question, pick(rng, value, f"`{value}`", f"It is {value}.", f"The result is {value}."))


def _words(rng: random.Random, low: int, high: int) -> list[str]:
    return rng.sample(_ALL, rng.randint(low, high))


def _spell(rng: random.Random) -> Exchange:
    word = rng.choice(_ALL)
    return Exchange(pick(rng, f"Spell the word {word}.", f"How do you spell {word}?"), "-".join(word))


def _count(rng: random.Random) -> Exchange:
    word = rng.choice(_ALL)
    letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("aeiourst")
    n = word.count(letter)
    question = pick(
        rng, f'How many times does the letter "{letter}" occur in "{word}"?', f'Count the {letter} in "{word}".'
    )
    found = [str(i + 1) for i, c in enumerate(word) if c == letter]
    thought = f"{'-'.join(word)}: " + (f"{letter} at {', '.join(found)}." if found else f"no {letter}.")
    return Exchange(question, pick(rng, f"{n}", f"{n} {'time' if n == 1 else 'times'}."), thought)


def _reverse(rng: random.Random) -> Exchange:
    word = rng.choice(_ALL)
    question = pick(rng, f'Reverse the word "{word}".', f"Write {word} backwards.", f'What is "{word}" backwards?')
    back = word[::-1]
    return Exchange(question, pick(rng, back, f'"{back}"'), f"{'-'.join(word)} becomes {'-'.join(back)}.")


def _case(rng: random.Random) -> Exchange:
    words = " ".join(_words(rng, 1, 3))
    if rng.random() < 0.5:
        question = pick(rng, f"Write {words} in capital letters.", f'Convert "{words}" to upper case.')
        return Exchange(question, words.upper())
    if rng.random() < 0.5:
        return Exchange(f'Convert "{words.upper()}" to lower case.', words)
    return Exchange(f'Capitalize each word: "{words}"', words.title())


def _length(rng: random.Random) -> Exchange:
    word = rng.choice(_ALL)
    question = pick(rng, f'How many letters does "{word}" have?', f"How long is the word {word}?")
    thought = ", ".join(f"{c} {i}" for i, c in enumerate(word, 1)) + "."
    return Exchange(question, pick(rng, f"{len(word)}", f"{len(word)} letters."), thought)


def _letter(rng: random.Random) -> Exchange:
    word = rng.choice(_ALL)
    if rng.random() < 0.3:
        return Exchange(f'What is the last letter of "{word}"?', word[-1])
    place = rng.randrange(min(len(word), 5))
    return Exchange(f'What is the {_ORDINALS[place]} letter of "{word}"?', word[place], f"{'-'.join(word)}.")


def _sort(rng: random.Random) -> Exchange:
    words = _words(rng, 3, 5)
    question = pick(
        rng, f"Sort these words alphabetically: {', '.join(words)}", f"Put {', '.join(words)} in alphabetical order."
    )
    return Exchange(question, ", ".join(sorted(words)))


def _longest(rng: random.Random) -> Exchange:
    words = _words(rng, 3, 5)
    longest = max(words, key=len)
    if sum(len(word) == len(longest) for word in words) > 1:
        return _letter(rng)
    thought = ", ".join(f"{word} {len(word)}" for word in words) + "."
    return Exchange(f"Which word is the longest: {', '.join(words)}?", longest, thought)


def _join(rng: random.Random) -> Exchange:
    words = _words(rng, 2, 4)
    mark, name = rng.choice(
        (("-", "hyphens"), ("_", "underscores"), ("+", "plus signs"), ("/", "slashes"), (".", "dots"))
    )
    return Exchange(f"Join the words {', '.join(words)} with {name}.", mark.join(words))


def _repeat(rng: random.Random) -> Exchange:
    word, n = rng.choice(_ALL), rng.randint(2, 5)
    return Exchange(f"Write the word {word} {n} times.", " ".join([word] * n))


def _odd_one(rng: random.Random) -> Exchange:
    groups = {"an animal": ANIMALS, "a color": COLOURS, "a job": JOBS, "a city": CITIES, "a first name": NAMES}
    (kind, group), (_, other) = rng.sample(sorted(groups.items()), 2)
    words = [*rng.sample(group, 3), rng.choice([word for word in other if word not in group])]
    stranger = words[-1]
    rng.shuffle(words)
    answer = f"{stranger}, because it is not {kind}."
    return Exchange(f"Which word does not belong: {', '.join(words)}?", answer, f"The others are each {kind}.")


def _first_letters(rng: random.Random) -> Exchange:
    words = _words(rng, 3, 6)
    return Exchange(f"Take the first letters of: {', '.join(words)}", "".join(word[0] for word in words))


def _word(rng: random.Random) -> str:
    return rng.choice(_ALL)


def _list(rng: random.Random, low: int = 2, high: int = 5, top: int = 20) -> list[int]:
    return [rng.randint(0, top) for _ in range(rng.randint(low, high))]


_TRUTHS = ("0", "1", "[]", "[0]", "''", "'a'", "None", "{}")
_VALUES = ("3", "'3'", "3.0", "[3]", "{3}", "(3,)", "None", "True")
_EXPRESSIONS: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: f'"{_word(rng)}".upper()',
    lambda rng: f'"{_word(rng)}".capitalize()',
    lambda rng: f'"{_word(rng).upper()}".lower()',
    lambda rng: f'len("{_word(rng)}")',
    lambda rng: f"len({_list(rng)})",
    lambda rng: f"sum({_list(rng)})",
    lambda rng: f"max({_list(rng)})",
    lambda rng: f"min({_list(rng)})",
    lambda rng: f"sorted({_list(rng)})",
    lambda rng: f"sorted({_list(rng)}, reverse=True)",
    lambda rng: f"{_list(rng)}[0]",
    lambda rng: f"{_list(rng)}[-1]",
    lambda rng: f"{_list(rng, 3, 6)}[1:3]",
    lambda rng: f"{_list(rng, 3, 5)}[::-1]",
    lambda rng: f"{_list(rng)} + {_list(rng)}",
    lambda rng: f"[0] * {rng.randint(2, 6)}",
    lambda rng: f"list(range({rng.randint(1, 8)}))",
    lambda rng: f"list(range({rng.randint(1, 5)}, {rng.randint(6, 10)}))",
    lambda rng: f'"{_word(rng)}"[0]',
    lambda rng: f'"{_word(rng)}"[-1]',
    lambda rng: f'"{_word(rng)}"[:2]',
    lambda rng: f'"{_word(rng)}"[::-1]',
    lambda rng: f'"{_word(rng)}" + "{_word(rng)}"',
    lambda rng: f'"-".join({rng.sample(_ALL, rng.randint(2, 4))})',
    lambda rng: f'"{" ".join(rng.sample(_ALL, rng.randint(2, 4)))}".split()',
    lambda rng: f'"{",".join(rng.sample(_ALL, rng.randint(2, 4)))}".split(",")',
    lambda rng: f'"{_word(rng)}".startswith("{rng.choice("abcdefghilmnoprst")}")',
    lambda rng: f'"{rng.choice("aeiou")}" in "{_word(rng)}"',
    lambda rng: f"{rng.randint(0, 20)} in {_list(rng)}",
    lambda rng: f'"{_word(rng)}".replace("{rng.choice("aeiou")}", "{rng.choice("aeiou")}")',
    lambda rng: f"{rng.randint(1, 50)} // {rng.randint(2, 9)}",
    lambda rng: f"{rng.randint(1, 50)} % {rng.randint(2, 9)}",
    lambda rng: f"{rng.randint(2, 9)} ** 2",
    lambda rng: f"abs({rng.randint(-50, 50)})",
    lambda rng: f"int('{rng.randint(0, 500)}') + {rng.randint(0, 20)}",
    lambda rng: f"str({rng.randint(0, 500)}) + '{rng.randint(0, 9)}'",
    lambda rng: f"bool({rng.choice(_TRUTHS)})",
    lambda rng: f"{rng.randint(0, 30)} < {rng.randint(0, 30)}",
    lambda rng: f"{rng.randint(0, 9)} == {rng.randint(0, 9)}",
    lambda rng: f"set({sorted(_list(rng, 2, 4, 4))})",
    lambda rng: f"dict({rng.choice(NOUNS)}={rng.randint(0, 99)})",
    lambda rng: f'{{"{_word(rng)}": {rng.randint(0, 99)}}}.get("{_word(rng)}", {rng.randint(0, 9)})',
    lambda rng: f"[n * {rng.randint(2, 5)} for n in {_list(rng, 2, 4)}]",
    lambda rng: f"[n for n in {_list(rng, 3, 6)} if n > {rng.randint(3, 15)}]",
    lambda rng: f"any({[rng.random() < 0.4 for _ in range(3)]})",
    lambda rng: f"all({[rng.random() < 0.7 for _ in range(3)]})",
    lambda rng: f"list(zip({_list(rng, 2, 2)}, {_list(rng, 2, 2)}))",
    lambda rng: f"list(enumerate({rng.sample(_ALL, 2)}))",
    lambda rng: f"round({rng.randint(0, 99) / 10 + 0.03:.2f}, 1)",
    lambda rng: f'"{_word(rng)}".count("{rng.choice("aeiourst")}")',
    lambda rng: f'"{_word(rng)}".find("{rng.choice("aeiourst")}")',
    lambda rng: f"f'{{{rng.randint(1, 20)} + {rng.randint(1, 20)}}}'",
    lambda rng: f"tuple({_list(rng, 2, 3)})",
    lambda rng: f"isinstance({rng.choice(_VALUES[:4])}, {rng.choice(('int', 'str', 'float', 'list'))})",
    lambda rng: f"type({rng.choice(_VALUES)}).__name__",
)
