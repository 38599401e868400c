"""Facts are told, one is asked for: the answer has to be read off the question."""

from __future__ import annotations

import random

from orchestrator.corpus.chat.exchange import Exchange, Step, pick
from orchestrator.corpus.words import ANIMALS, CITIES, COLOURS, JOBS, NAMES, NOUNS, OBJECTS, article

_PLACES = (
    "kitchen",
    "garden",
    "hall",
    "cellar",
    "office",
    "garage",
    "attic",
    "bedroom",
    "car",
    "shed",
    "library",
    "bath",
)


def reading(rng: random.Random) -> Exchange:
    """Two to four facts of one kind and a question about one of them."""
    kind = rng.choice((_places, _homes, _colours, _pets, _jobs, _codes))
    count = rng.randint(2, 4)
    facts, question, answer = kind(rng, count)
    rng.shuffle(facts)
    text = " ".join(facts)
    whole = pick(rng, f"{text} {question}", f"{text}\n\n{question}", f"Read this: {text}\n{question}")
    return Exchange(whole, answer)


def remember(rng: random.Random, between: list[Step]) -> tuple[Step, ...]:
    """A conversation in which something said first is asked for at the end, after the steps of `between`."""
    name, city, animal = rng.choice(NAMES), rng.choice(CITIES), rng.choice(ANIMALS)
    told, question, answer = rng.choice(
        (
            (f"My name is {name}.", "What is my name?", f"Your name is {name}."),
            (f"I am {name}.", "Do you remember my name?", f"Yes, you are {name}."),
            (f"I live in {city}.", "Where do I live?", f"You live in {city}."),
            (f"I come from {city}.", "Which city do I come from?", f"You come from {city}."),
            (f"I have {article(animal)}.", "Which animal do I have?", f"You have {article(animal)}."),
            (f"My favorite animal is the {animal}.", "What is my favorite animal?", f"The {animal}."),
        )
    )
    first = Step(told, pick(rng, "I see.", "Good to know.", "All right.", "Thank you for telling me.", "Noted."))
    return (first, *between, Step(question, answer))


Facts = tuple[list[str], str, str]


def _places(rng: random.Random, count: int) -> Facts:
    things, places = rng.sample(OBJECTS, count), rng.sample(_PLACES, count)
    facts = [f"The {thing} is in the {place}." for thing, place in zip(things, places, strict=True)]
    if rng.random() < 0.3:
        return facts, f"What is in the {places[0]}?", f"The {things[0]}."
    return (
        facts,
        f"Where is the {things[0]}?",
        pick(rng, f"The {things[0]} is in the {places[0]}.", f"In the {places[0]}."),
    )


def _homes(rng: random.Random, count: int) -> Facts:
    names, cities = rng.sample(NAMES, count), rng.sample(CITIES, count)
    facts = [f"{name} lives in {city}." for name, city in zip(names, cities, strict=True)]
    if rng.random() < 0.3:
        return facts, f"Who lives in {cities[0]}?", f"{names[0]}."
    return facts, f"Where does {names[0]} live?", pick(rng, f"{names[0]} lives in {cities[0]}.", f"In {cities[0]}.")


def _colours(rng: random.Random, count: int) -> Facts:
    things, colours = rng.sample(OBJECTS, count), rng.sample(COLOURS, count)
    facts = [f"The {thing} is {colour}." for thing, colour in zip(things, colours, strict=True)]
    if rng.random() < 0.3:
        return facts, f"What is {colours[0]}?", f"The {things[0]}."
    return (
        facts,
        f"What color is the {things[0]}?",
        pick(rng, f"The {things[0]} is {colours[0]}.", f"It is {colours[0]}."),
    )


def _pets(rng: random.Random, count: int) -> Facts:
    names, animals = rng.sample(NAMES, count), rng.sample(ANIMALS, count)
    facts = [f"{name} has a pet {animal}." for name, animal in zip(names, animals, strict=True)]
    return (
        facts,
        f"Which pet does {names[0]} have?",
        pick(rng, f"{names[0]} has {article(animals[0])}.", f"The {animals[0]}."),
    )


def _jobs(rng: random.Random, count: int) -> Facts:
    names, jobs = rng.sample(NAMES, count), rng.sample(JOBS, count)
    facts = [f"{name} works as {article(job)}." for name, job in zip(names, jobs, strict=True)]
    if rng.random() < 0.3:
        return facts, f"Who is the {jobs[0]}?", f"{names[0]}."
    return facts, f"What is the job of {names[0]}?", f"{names[0]} works as {article(jobs[0])}."


def _codes(rng: random.Random, count: int) -> Facts:
    names, codes = rng.sample(NOUNS, count), [rng.randint(1000, 9999) for _ in range(count)]
    facts = [f"The code of the {name} is {code}." for name, code in zip(names, codes, strict=True)]
    return facts, f"What is the code of the {names[0]}?", pick(rng, f"{codes[0]}", f"The code is {codes[0]}.")
