"""Arithmetic with computed answers."""

from __future__ import annotations

import random

from orchestrator.corpus.chat.exchange import Exchange, pick
from orchestrator.corpus.words import CITIES, NAMES, OBJECTS, plural

_WORDS = {"+": "plus", "-": "minus", "*": "times"}


def arithmetic(rng: random.Random) -> Exchange:
    """One question out of all kinds below."""
    kinds = (_sum, _sum, _product, _division, _shop, _give, _percent, _compare, _sequence, _average, _travel)
    return rng.choice((*kinds, _even, _power, _convert, _sort, _extreme, _chain))(rng)


def _ask(rng: random.Random, expression: str) -> str:
    return pick(
        rng,
        f"What is {expression}?",
        f"Calculate {expression}.",
        f"{expression} = ?",
        f"Compute {expression}, please.",
        f"How much is {expression}?",
        f"Please work out {expression}.",
        f"{expression}",
        f"Give me the result of {expression}.",
    )


def _say(rng: random.Random, expression: str, value: object) -> str:
    return pick(
        rng, f"{value}", f"{expression} = {value}", f"The answer is {value}.", f"{expression} is {value}.", f"{value}."
    )


def _sum(rng: random.Random) -> Exchange:
    high = rng.choice((10, 20, 100, 100, 1000))
    a, b, sign = rng.randint(0, high), rng.randint(0, high), rng.choice("+-")
    value = a + b if sign == "+" else a - b
    spelt = f"{a} {sign} {b}" if rng.random() < 0.7 else f"{a} {_WORDS[sign]} {b}"
    return Exchange(_ask(rng, spelt), _say(rng, spelt, value), _column(a, b, sign, value))


def _column(a: int, b: int, sign: str, value: int) -> str:
    if sign == "+" and a > 9 and b > 9:
        tens, ones = b // 10 * 10, b % 10
        return f"{a} + {tens} = {a + tens}, and {a + tens} + {ones} = {value}."
    return f"{a} {sign} {b} = {value}."


def _product(rng: random.Random) -> Exchange:
    a, b = rng.randint(2, 12), rng.randint(2, rng.choice((10, 12, 50)))
    spelt = f"{a} * {b}" if rng.random() < 0.7 else f"{a} times {b}"
    value = a * b
    thought = f"{a} * {b} = {value}."
    if b > 12:
        tens, ones = b // 10 * 10, b % 10
        thought = f"{a} * {tens} = {a * tens}, {a} * {ones} = {a * ones}, together {value}."
    return Exchange(_ask(rng, spelt), _say(rng, spelt, value), thought)


def _division(rng: random.Random) -> Exchange:
    b, quotient = rng.randint(2, 12), rng.randint(1, 20)
    a = b * quotient
    if rng.random() < 0.3:
        a += rng.randint(1, b - 1)
        rest = a - b * quotient
        question = pick(rng, f"What is the remainder of {a} divided by {b}?", f"What is {a} modulo {b}?")
        return Exchange(question, f"{rest}", f"{b} * {quotient} = {b * quotient}, and {a} - {b * quotient} = {rest}.")
    spelt = rng.choice((f"{a} / {b}", f"{a} divided by {b}"))
    return Exchange(_ask(rng, spelt), _say(rng, spelt, quotient), f"{b} * {quotient} = {a}, so {quotient}.")


def _shop(rng: random.Random) -> Exchange:
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    count, price = rng.randint(2, 12), rng.randint(1, 20)
    money = rng.choice(("euros", "dollars", "pounds", "francs", "coins"))
    total = count * price
    question = pick(
        rng,
        f"{name} buys {count} {plural(thing)} for {price} {money} each. How much does {name} pay?",
        f"One {thing} costs {price} {money}. What do {count} {plural(thing)} cost?",
        f"If {count} {plural(thing)} cost {price} {money} each, what is the total?",
    )
    answer = pick(rng, f"{count} * {price} = {total} {money}.", f"{total} {money}.", f"The total is {total} {money}.")
    return Exchange(question, answer, f"{count} * {price} = {total}.")


def _give(rng: random.Random) -> Exchange:
    first, second = rng.sample(NAMES, 2)
    things = plural(rng.choice(OBJECTS))
    have = rng.randint(5, 60)
    change = rng.randint(1, have - 1)
    if rng.random() < 0.5:
        left, sign = have - change, "-"
        question = f"{first} has {have} {things} and gives {change} to {second}. How many are left?"
        answer = pick(rng, f"{first} has {left} {things} left.", f"{left} {things}.", f"{have} - {change} = {left}.")
    else:
        left, sign = have + change, "+"
        question = f"{first} has {have} {things} and gets {change} more from {second}. How many {things} is that?"
        answer = pick(rng, f"{first} has {left} {things} now.", f"{left} {things}.", f"{have} + {change} = {left}.")
    return Exchange(question, answer, f"{have} {sign} {change} = {left}.")


def _percent(rng: random.Random) -> Exchange:
    rate, base = rng.choice((5, 10, 20, 25, 50, 75)), rng.randint(1, 25) * 20
    value = rate * base // 100
    question = pick(rng, f"What is {rate}% of {base}?", f"How much is {rate} percent of {base}?")
    return Exchange(
        question, pick(rng, f"{value}", f"{rate}% of {base} is {value}."), f"{base} * {rate} / 100 = {value}."
    )


def _compare(rng: random.Random) -> Exchange:
    a, b = rng.sample(range(1, rng.choice((20, 100, 1000))), 2)
    large = rng.random() < 0.6
    found = max(a, b) if large else min(a, b)
    word = rng.choice(("larger", "greater", "bigger") if large else ("smaller", "less"))
    question = f"Which number is {word}, {a} or {b}?"
    return Exchange(question, pick(rng, f"{found}", f"{found} is {word}."), f"{max(a, b)} > {min(a, b)}.")


def _sequence(rng: random.Random) -> Exchange:
    start, step = rng.randint(0, 30), rng.randint(1, 12)
    shown = [start + i * step for i in range(rng.randint(3, 5))]
    following = shown[-1] + step
    text = ", ".join(map(str, shown))
    question = pick(
        rng, f"What comes next: {text}, ...?", f"Continue the sequence {text}.", f"Next number after {text}?"
    )
    thought = f"The numbers grow by {step}. {shown[-1]} + {step} = {following}."
    answer = pick(rng, f"{following}", f"The next number is {following}: each step adds {step}.")
    return Exchange(question, answer, thought)


def _average(rng: random.Random) -> Exchange:
    count = rng.randint(2, 4)
    mean = rng.randint(3, 40)
    numbers = [mean + rng.randint(-3, 3) for _ in range(count - 1)]
    numbers.append(mean * count - sum(numbers))
    text = " and ".join(map(str, numbers)) if count == 2 else ", ".join(map(str, numbers))
    question = pick(rng, f"What is the average of {text}?", f"Find the mean of {text}.")
    thought = f"The sum is {mean * count}, and {mean * count} / {count} = {mean}."
    return Exchange(question, pick(rng, f"{mean}", f"The average is {mean}."), thought)


def _travel(rng: random.Random) -> Exchange:
    speed, hours = rng.randint(2, 12) * 10, rng.randint(2, 6)
    start, end = rng.sample(CITIES, 2)
    way = speed * hours
    question = pick(
        rng,
        f"A train from {start} to {end} goes {speed} km an hour for {hours} hours. How far is that?",
        f"How far does a car get in {hours} hours at {speed} km/h?",
    )
    return Exchange(question, pick(rng, f"{way} km.", f"{speed} * {hours} = {way} km."), f"{speed} * {hours} = {way}.")


def _even(rng: random.Random) -> Exchange:
    n = rng.randint(0, rng.choice((20, 100, 1000)))
    even = n % 2 == 0
    asked_even = rng.random() < 0.5
    word = "even" if asked_even else "odd"
    answer = f"{'Yes' if even == asked_even else 'No'}, {n} is {'even' if even else 'odd'}."
    return Exchange(f"Is {n} {rng.choice((word, f'an {word} number'))}?", answer, f"The last digit of {n} is {n % 10}.")


def _power(rng: random.Random) -> Exchange:
    base, exponent = rng.choice(((rng.randint(2, 15), 2), (rng.randint(2, 6), 3), (2, rng.randint(1, 10))))
    value = base**exponent
    spelt = rng.choice((f"{base} ** {exponent}", f"{base} to the power of {exponent}"))
    return Exchange(_ask(rng, spelt), _say(rng, spelt, value), " * ".join([str(base)] * exponent) + f" = {value}.")


def _convert(rng: random.Random) -> Exchange:
    units = (("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7))
    big, small, factor = rng.choice((*units, ("meters", "centimeters", 100), ("kilometers", "meters", 1000)))
    n = rng.randint(2, 20)
    question = pick(rng, f"How many {small} are {n} {big}?", f"Convert {n} {big} to {small}.")
    value = n * factor
    return Exchange(
        question, pick(rng, f"{value} {small}.", f"{n} {big} are {value} {small}."), f"{n} * {factor} = {value}."
    )


def _sort(rng: random.Random) -> Exchange:
    numbers = rng.sample(range(1, 100), rng.randint(3, 6))
    down = rng.random() < 0.4
    text, done = ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers, reverse=down)))
    order = "descending order" if down else rng.choice(("ascending order", "order"))
    return Exchange(pick(rng, f"Sort {text} in {order}.", f"Put these numbers in {order}: {text}"), done)


def _extreme(rng: random.Random) -> Exchange:
    numbers = rng.sample(range(1, 200), rng.randint(3, 6))
    text = ", ".join(map(str, numbers))
    if rng.random() < 0.5:
        return Exchange(f"What is the largest of {text}?", f"{max(numbers)}")
    return Exchange(f"What is the smallest of {text}?", f"{min(numbers)}")


def _chain(rng: random.Random) -> Exchange:
    a, b, c = rng.randint(1, 30), rng.randint(2, 9), rng.randint(2, 9)
    product = b * c
    spelt = f"{a} + {b} * {c}"
    return Exchange(
        _ask(rng, spelt),
        _say(rng, spelt, a + product),
        f"First {b} * {c} = {product}. Then {a} + {product} = {a + product}.",
    )
