"""Conversations with tools: definitions, the right call, its result, the answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from orchestrator.corpus.chat.exchange import Call, Chat, Step, Tool, pick
from orchestrator.corpus.chat.small_talk import small_talk
from orchestrator.corpus.words import CITIES, JOBS, NAMES, NOUNS, OBJECTS, article, plural


def _tool(name: str, description: str, /, **parameters: tuple[str, str]) -> Tool:
    inner = {key: {"type": kind, "description": text} for key, (kind, text) in parameters.items()}
    return Tool(name, description, {"type": "object", "properties": inner, "required": list(parameters)})


_CITY = ("string", "Name of the city")
WEATHER = _tool("get_weather", "Get the current weather in a city", city=_CITY)
FORECAST = _tool("get_forecast", "Weather of the coming days", city=_CITY, days=("integer", "How many days"))
TIME = _tool("get_time", "Get the local time in a city", city=_CITY)
CALCULATOR = _tool("calculator", "Evaluate an arithmetic expression", expression=("string", "For example 2 * (3 + 4)"))
CONVERT = _tool(
    "convert_currency", "Convert an amount of money", amount=("number", "Amount"),
    source=("string", "Currency to convert from"), target=("string", "Currency to convert to"),
)  # fmt: skip
MAIL = _tool(
    "send_email", "Send an email", to=("string", "Recipient"), subject=("string", "Subject"), body=("string", "Text")
)
EVENT = _tool(
    "create_event", "Put an event into the calendar", title=("string", "Title"), day=("string", "Day of the week"),
    hour=("integer", "Hour, 0 to 23"),
)  # fmt: skip
READ = _tool("read_file", "Read a text file", path=("string", "Path of the file"))
LIST = _tool("list_files", "List the files of a folder", folder=("string", "Path of the folder"))
SEARCH = _tool("search_web", "Search the web", query=("string", "What to search for"))
STOCK = _tool("get_stock", "How many of an item are in stock", item=("string", "Name of the item"))
USER = _tool("find_user", "Look up a user by name", name=("string", "First name"))
TIMER = _tool("set_timer", "Start a timer", minutes=("integer", "Minutes"))
LIGHT = _tool("set_light", "Switch a light", room=("string", "Room"), on=("boolean", "Whether it shall be on"))
RUN = _tool("run_python", "Run Python code and return what it prints", code=("string", "The code"))
DISTANCE = _tool("get_distance", "Distance between two cities in km", start=_CITY, end=_CITY)
ALL = (
    WEATHER, FORECAST, TIME, CALCULATOR, CONVERT, MAIL, EVENT, READ,
    LIST, SEARCH, STOCK, USER, TIMER, LIGHT, RUN, DISTANCE,
)  # fmt: skip

Use = tuple[Tool, Step]


def tool_chat(rng: random.Random) -> Chat:
    """One to three tools are offered. Mostly one is called; sometimes two at once, or none because none is needed."""
    way = rng.random()
    if way < 0.1:
        talk = small_talk(rng)
        return Chat((Step(talk.question, talk.answer),), tools=_offer(rng, rng.choice(ALL)))
    if way < 0.25:
        return _two_cities(rng)
    tool, step = rng.choice(_USES)(rng)
    steps = [step]
    if way > 0.9:
        steps.append(Step(*rng.choice((("Thanks!", "You are welcome!"), ("Thank you.", "Glad to help.")))))
    return Chat(tuple(steps), tools=_offer(rng, tool), system=rng.choice(("", "", "You are a helpful assistant.")))


def _offer(rng: random.Random, tool: Tool) -> tuple[Tool, ...]:
    others = [other for other in ALL if other is not tool]
    offered = [tool, *rng.sample(others, rng.choice((0, 0, 1, 1, 2)))]
    rng.shuffle(offered)
    return tuple(offered)


def _step(tool: Tool, question: str, arguments: dict[str, Any], result: str, answer: str) -> Use:
    shown = ", ".join(f"{key} {json.dumps(value)}" for key, value in arguments.items())
    thought = f"I need {tool.name} with {shown}."
    return tool, Step(question, answer, thought, (Call(tool.name, arguments, result),), f"The tool says: {result[:60]}")


def _sky(rng: random.Random) -> tuple[str, int]:
    return rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "stormy", "snowy")), rng.randint(-8, 36)


def _weather(rng: random.Random) -> Use:
    city, (sky, degrees) = rng.choice(CITIES), _sky(rng)
    question = pick(
        rng, f"What is the weather in {city}?", f"How is the weather in {city} today?", f"Is it raining in {city}?",
        f"Weather in {city}?", f"Tell me the temperature in {city}.", f"Do I need a coat in {city}?",
    )  # fmt: skip
    result = rng.choice((json.dumps({"sky": sky, "temperature": degrees}), f"{sky}, {degrees} degrees"))
    answer = pick(rng, f"In {city} it is {sky} at {degrees} degrees.", f"It is {sky} in {city}, {degrees} degrees.")
    return _step(WEATHER, question, {"city": city}, result, answer)


def _forecast(rng: random.Random) -> Use:
    city, days = rng.choice(CITIES), rng.randint(2, 4)
    skies = [_sky(rng)[0] for _ in range(days)]
    question = pick(
        rng, f"What will the weather be in {city} in the next {days} days?", f"Forecast for {city}, {days} days."
    )
    answer = f"The next {days} days in {city}: {', '.join(skies)}."
    return _step(FORECAST, question, {"city": city, "days": days}, json.dumps(skies), answer)


def _time(rng: random.Random) -> Use:
    city, time = rng.choice(CITIES), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    question = pick(rng, f"What time is it in {city}?", f"Tell me the time in {city}.", f"How late is it in {city}?")
    return _step(
        TIME, question, {"city": city}, time, pick(rng, f"It is {time} in {city}.", f"In {city} it is {time} now.")
    )


def _calculate(rng: random.Random) -> Use:
    a, b, c = rng.randint(100, 9999), rng.randint(100, 9999), rng.randint(2, 99)
    expression = rng.choice(
        (f"{a} * {b}", f"{a} + {b}", f"{a} - {b}", f"({a} + {b}) * {c}", f"{a} * {c} - {b}", f"{a} ** 2")
    )
    value = str(eval(expression, {}))
    question = pick(rng, f"What is {expression}?", f"Calculate {expression}.", f"Use the calculator: {expression}")
    answer = pick(rng, f"{expression} = {value}", f"The result is {value}.", value)
    return _step(CALCULATOR, question, {"expression": expression}, value, answer)


def _convert(rng: random.Random) -> Use:
    source, target = rng.sample(("USD", "EUR", "GBP", "JPY", "CHF", "SEK", "NOK", "CAD"), 2)
    amount, value = rng.randint(1, 900), f"{rng.randint(100, 99999) / 100:.2f}"
    question = pick(rng, f"Convert {amount} {source} to {target}.", f"How much is {amount} {source} in {target}?")
    answer = f"{amount} {source} are {value} {target}."
    return _step(CONVERT, question, {"amount": amount, "source": source, "target": target}, value, answer)


def _mail(rng: random.Random) -> Use:
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    subject, body = rng.choice(
        (
            ("Meeting", f"We meet at {rng.randint(8, 18)}."),
            (thing.title(), f"Your {thing} is here."),
            ("Hello", "How are you?"),
        )
    )
    address = f"{name.lower()}@example.com"
    question = f'Send an email to {address} with the subject "{subject}" and the text "{body}"'
    answer = pick(rng, f"The email to {address} was sent.", f"Done: I sent it to {address}.")
    return _step(MAIL, question, {"to": address, "subject": subject, "body": body}, rng.choice(("sent", "ok")), answer)


def _event(rng: random.Random) -> Use:
    day, hour = rng.choice(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")), rng.randint(7, 21)
    title = rng.choice(
        (f"Lunch with {rng.choice(NAMES)}", f"Call {rng.choice(NAMES)}", f"Meet the {rng.choice(JOBS)}", "Review")
    )
    question = pick(
        rng, f'Add "{title}" to my calendar on {day} at {hour}:00.', f'Create an event "{title}", {day}, {hour} h.'
    )
    answer = f'"{title}" is in your calendar on {day} at {hour}:00.'
    return _step(EVENT, question, {"title": title, "day": day, "hour": hour}, '{"status": "created"}', answer)


def _path(rng: random.Random) -> str:
    return f"{rng.choice(NOUNS)}/{rng.choice(NOUNS)}.{rng.choice(('txt', 'md', 'py', 'csv', 'json'))}"


def _read(rng: random.Random) -> Use:
    path, text = _path(rng), f"{rng.choice(NOUNS)} {rng.randint(1, 999)}"
    question = pick(rng, f"What is in the file {path}?", f"Read {path}.", f"Show me the contents of {path}.")
    return _step(
        READ, question, {"path": path}, text, pick(rng, f"The file {path} contains: {text}", f"{path}: {text}")
    )


def _list(rng: random.Random) -> Use:
    folder, names = rng.choice(NOUNS), [_path(rng).split("/")[1] for _ in range(rng.randint(1, 4))]
    question = pick(rng, f"Which files are in the folder {folder}?", f"List the files in {folder}.")
    return _step(
        LIST, question, {"folder": folder}, "\n".join(names), f"The folder {folder} contains {', '.join(names)}."
    )


def _search(rng: random.Random) -> Use:
    query = rng.choice(
        (
            f"{rng.choice(JOBS)} in {rng.choice(CITIES)}",
            f"history of {rng.choice(CITIES)}",
            f"buy {article(rng.choice(OBJECTS))}",
        )
    )
    found = f"{rng.choice(NOUNS).title()} {rng.choice(NOUNS).title()}"
    question = pick(rng, f"Search the web for {query}.", f"Please look up {query}.", f"Find {query}.")
    return _step(
        SEARCH, question, {"query": query}, f'[{{"title": "{found}"}}]', f"The first result for {query} is: {found}."
    )


def _stock(rng: random.Random) -> Use:
    thing, left = rng.choice(OBJECTS), rng.randint(0, 120)
    question = pick(
        rng,
        f"How many {plural(thing)} do we have?",
        f"Are there {plural(thing)} in stock?",
        f"Check the stock of {thing}.",
    )
    noun = thing if left == 1 else plural(thing)
    answer = f"There {'is' if left == 1 else 'are'} {left or 'no'} {noun} in stock."
    return _step(STOCK, question, {"item": thing}, str(left), answer)


def _user(rng: random.Random) -> Use:
    name, city, job = rng.choice(NAMES), rng.choice(CITIES), rng.choice(JOBS)
    question = pick(rng, f"Where does {name} live?", f"Look up the user {name}.", f"What do we know about {name}?")
    result = json.dumps({"name": name, "city": city, "job": job})
    return _step(USER, question, {"name": name}, result, f"{name} lives in {city} and works as {article(job)}.")


def _timer(rng: random.Random) -> Use:
    minutes = rng.randint(2, 90)
    question = pick(
        rng, f"Set a timer for {minutes} minutes.", f"Wake me in {minutes} minutes.", f"Timer: {minutes} minutes"
    )
    return _step(TIMER, question, {"minutes": minutes}, "started", f"The timer is set to {minutes} minutes.")


def _light(rng: random.Random) -> Use:
    room, on = (
        rng.choice(("kitchen", "hall", "bedroom", "office", "bathroom", "garage", "cellar", "attic")),
        rng.random() < 0.5,
    )
    word = "on" if on else "off"
    question = pick(
        rng,
        f"Turn {word} the light in the {room}.",
        f"Light {word} in the {room}, please.",
        f"Switch {word} the {room} light.",
    )
    return _step(LIGHT, question, {"room": room, "on": on}, "ok", f"The light in the {room} is {word} now.")


def _run(rng: random.Random) -> Use:
    n = rng.randint(5, 60)
    code, value = rng.choice(
        (
            (f"print(sum(range({n})))", sum(range(n))),
            (f"print({n} ** 3)", n**3),
            (f"print(len(str(2 ** {n})))", len(str(2**n))),
            (f"for i in range({n % 4 + 1}):\n    print(i * i)", "\n".join(str(i * i) for i in range(n % 4 + 1))),
        )
    )
    question = pick(rng, f"Run this code:\n\n```python\n{code}\n```", f"What does this print? Run it.\n\n{code}")
    return _step(RUN, question, {"code": code}, str(value), f"It prints:\n\n```\n{value}\n```")


def _distance(rng: random.Random) -> Use:
    (start, end), km = rng.sample(CITIES, 2), rng.randint(60, 9000)
    question = pick(rng, f"How far is it from {start} to {end}?", f"Distance between {start} and {end}?")
    return _step(DISTANCE, question, {"start": start, "end": end}, str(km), f"From {start} to {end} it is {km} km.")


def _two_cities(rng: random.Random) -> Chat:
    first, second = rng.sample(CITIES, 2)
    (sky1, a), (sky2, b) = _sky(rng), _sky(rng)
    calls = tuple(
        Call(WEATHER.name, {"city": city}, f"{sky}, {degrees} degrees")
        for city, sky, degrees in ((first, sky1, a), (second, sky2, b))
    )
    warmer = first if a > b else second
    question, answer = rng.choice(
        (
            (
                f"What is the weather in {first} and {second}?",
                f"{first}: {sky1}, {a} degrees. {second}: {sky2}, {b} degrees.",
            ),
            (f"Is it warmer in {first} or in {second}?", f"{a} and {b} degrees: it is warmer in {warmer}."),
        )
    )
    if a == b:
        question, answer = (
            f"Compare the weather in {first} and {second}.",
            f"{first}: {sky1}. {second}: {sky2}. Both {a} degrees.",
        )
    step = Step(
        question, answer, f"I need the weather of {first} and of {second}.", calls, f"{first} {a}, {second} {b}."
    )
    return Chat((step,), tools=_offer(rng, WEATHER))


_USES: tuple[Callable[[random.Random], Use], ...] = (
    _weather, _weather, _forecast, _time, _calculate, _calculate, _convert, _mail, _event, _read,
    _list, _search, _stock, _user, _timer, _light, _run, _distance,
)  # fmt: skip
