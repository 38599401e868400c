"""Words that fill the slots of made-up texts."""

from __future__ import annotations

from pathlib import Path

Words = tuple[str, ...]


def read_words(text: str) -> dict[str, Words]:
    """Words by kind, from text in which a line with a colon at its end names the kind of the lines below it."""
    kinds: dict[str, list[str]] = {}
    kind = ""
    for line in text.splitlines():
        if line.endswith(":"):
            kind = line[:-1]
        elif not line.startswith("#"):
            kinds.setdefault(kind, []).extend(line.split())
    return {kind: tuple(words) for kind, words in kinds.items() if kind}


_KINDS = read_words((Path(__file__).parent / "words.txt").read_text(encoding="utf-8"))
NAMES, CITIES, OBJECTS, ANIMALS = (_KINDS[kind] for kind in ("names", "cities", "objects", "animals"))
COLOURS, ADJECTIVES, JOBS, NOUNS = (_KINDS[kind] for kind in ("colours", "adjectives", "jobs", "nouns"))


def plural(noun: str) -> str:
    """More than one of it, by the rules that the words above follow."""
    irregular = {"knife": "knives", "mouse": "mice", "goose": "geese", "wolf": "wolves", "sheep": "sheep"}
    if noun in irregular:
        return irregular[noun]
    if noun.endswith(("s", "sh", "ch", "x")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def listed(words: list[str]) -> str:
    """Words in a sentence: "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
