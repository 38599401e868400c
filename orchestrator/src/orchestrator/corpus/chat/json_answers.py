"""Conversations whose answer is JSON: fields read out of a sentence."""

from __future__ import annotations

import json
import random
from typing import Any

from orchestrator.corpus.chat.exchange import Chat, Step, pick
from orchestrator.corpus.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    JOBS,
    NAMES,
    OBJECTS,
    article,
    listed,
    plural,
)

Fields = dict[str, Any]


def json_chat(rng: random.Random) -> Chat:
    """A sentence, the fields wanted, and the object. The request comes by schema, by JSON mode or in words alone."""
    sentence, fields = rng.choice((_person, _order, _meeting, _pet, _book, _trip, _numbers, _stock, _review))(rng)
    keys = list(fields)
    if len(keys) > 2 and rng.random() < 0.5:
        chosen = rng.sample(keys, rng.randint(2, len(keys)))
        keys = [key for key in keys if key in chosen]
    wanted = {key: fields[key] for key in keys}
    names = listed(keys)
    request = pick(
        rng,
        f"Extract {names} as JSON: {sentence}",
        f"{sentence}\n\nReturn a JSON object with {names}.",
        f"Give me {names} of this text as a JSON object.\n\n{sentence}",
        f"Turn this into JSON with the keys {names}: {sentence}",
        f"Read {names} from the following text and answer in JSON.\n{sentence}",
    )
    answer = json.dumps(wanted)
    way = rng.random()
    if way < 0.35:
        question = rng.choice((request, f"Extract the fields: {sentence}", sentence))
        return Chat((Step(question, answer),), schema=schema_of(wanted))
    if way < 0.65:
        return Chat((Step(request, answer),), schema={})
    if way < 0.8:
        return Chat(
            (Step(request, json.dumps(wanted, indent=2)),), system="Answer with JSON that is indented by two spaces."
        )
    return Chat((Step(request, answer),), system=rng.choice(("", "", "Answer in JSON only.", "Reply with JSON.")))


def schema_of(value: Any) -> dict[str, Any]:
    """A JSON schema that the value obeys, all its keys required."""
    if isinstance(value, dict):
        inner = {key: schema_of(part) for key, part in value.items()}
        return {"type": "object", "properties": inner, "required": list(value)}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0])}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[type(value)]}


def _person(rng: random.Random) -> tuple[str, Fields]:
    name, age, city, job = rng.choice(NAMES), rng.randint(18, 80), rng.choice(CITIES), rng.choice(JOBS)
    sentence = pick(
        rng,
        f"{name} is {age} years old, lives in {city} and works as {article(job)}.",
        f"{name}, {age}, is {article(job)} from {city}.",
        f"The {job} {name} ({age}) comes from {city}.",
    )
    return sentence, {"name": name, "age": age, "city": city, "job": job}


def _order(rng: random.Random) -> tuple[str, Fields]:
    name, thing, count, price = rng.choice(NAMES), rng.choice(OBJECTS), rng.randint(2, 30), rng.randint(2, 200)
    sentence = pick(
        rng,
        f"{name} ordered {count} {plural(thing)} for {price} euros.",
        f"Order of {name}: {count} {plural(thing)}, {price} euros in all.",
        f"For {price} euros {name} bought {count} {plural(thing)}.",
    )
    return sentence, {"customer": name, "item": thing, "quantity": count, "price": price}


def _meeting(rng: random.Random) -> tuple[str, Fields]:
    people = rng.sample(NAMES, rng.randint(2, 3))
    day = rng.choice(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"))
    time, room = f"{rng.randint(8, 18):02}:{rng.choice(('00', '15', '30', '45'))}", rng.randint(1, 40)
    sentence = pick(
        rng,
        f"{listed(people)} meet on {day} at {time} in room {room}.",
        f"The meeting of {listed(people)} is in room {room} on {day}, {time}.",
    )
    return sentence, {"people": people, "day": day, "time": time, "room": room}


def _pet(rng: random.Random) -> tuple[str, Fields]:
    name, animal, colour, age = rng.choice(NAMES), rng.choice(ANIMALS), rng.choice(COLOURS), rng.randint(1, 15)
    sentence = f"{name} the {animal} is {colour} and {age} years old."
    return sentence, {"name": name, "animal": animal, "color": colour, "age": age}


def _book(rng: random.Random) -> tuple[str, Fields]:
    title = f"The {rng.choice(ADJECTIVES).title()} {rng.choice((*ANIMALS, *OBJECTS)).title()}"
    author, year, pages = rng.choice(NAMES), rng.randint(1900, 2025), rng.randint(80, 900)
    sentence = f'"{title}" by {author} came out in {year} and has {pages} pages.'
    return sentence, {"title": title, "author": author, "year": year, "pages": pages}


def _trip(rng: random.Random) -> tuple[str, Fields]:
    (start, end), hours = rng.sample(CITIES, 2), rng.randint(1, 14)
    means = rng.choice(("train", "bus", "car", "plane", "ship"))
    sentence = pick(
        rng,
        f"The {means} from {start} to {end} takes {hours} hours.",
        f"By {means}, {start} to {end} is {hours} hours.",
    )
    return sentence, {"from": start, "to": end, "by": means, "hours": hours}


def _numbers(rng: random.Random) -> tuple[str, Fields]:
    numbers = [rng.randint(0, 99) for _ in range(rng.randint(3, 6))]
    sentence = f"The measurements were {listed([str(n) for n in numbers])}."
    return sentence, {"values": numbers, "count": len(numbers), "largest": max(numbers)}


def _stock(rng: random.Random) -> tuple[str, Fields]:
    thing, colour, left = rng.choice(OBJECTS), rng.choice(COLOURS), rng.choice((0, rng.randint(1, 99)))
    sentence = f"We have {left or 'no'} {colour} {plural(thing)} in stock."
    return sentence, {"item": thing, "color": colour, "in_stock": left > 0, "quantity": left}


def _review(rng: random.Random) -> tuple[str, Fields]:
    thing, stars, name = rng.choice(OBJECTS), rng.randint(1, 5), rng.choice(NAMES)
    mood = "positive" if stars > 3 else "negative" if stars < 3 else "neutral"
    word = {"positive": "It works very well.", "negative": "It broke at once.", "neutral": "It is all right."}[mood]
    sentence = f"{name} gave the {thing} {stars} of 5 stars. {word}"
    return sentence, {"product": thing, "reviewer": name, "stars": stars, "sentiment": mood}
