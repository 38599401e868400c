import json
import random
import re
import threading

import jsonschema
import numpy as np
import pytest

from orchestrator.engine.grammar import MAX_TEXT, GrammarCompiler
from orchestrator.engine.request import GrammarSpec
from orchestrator.text import bundled_tokenizer

MINI = bundled_tokenizer("v41-mini")
COMPILER = GrammarCompiler(MINI)
WIDTH = -(-MINI.vocab_size // 32)


def options(matcher) -> np.ndarray:
    row = np.zeros(WIDTH, np.int32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: MINI.vocab_size])


def walk(spec: GrammarSpec, seed: int, limit: int = 400) -> str:
    """A random text that the masks allow, ended as soon as it may end after a while."""
    rng, matcher, ids = random.Random(seed), COMPILER.compile(spec), []
    while not matcher.stopped and len(ids) < limit:
        if matcher.accepting and rng.random() < 0.3:
            break
        choice = [int(i) for i in options(matcher) if i not in MINI.eos_ids]
        short = [i for i in choice if MINI.token_bytes(i)[-1:] in (b'"', b"}", b"]", b",")]
        ids.append(rng.choice(short if short and rng.random() < 0.5 else choice))
        matcher.consume(ids[-1])
    assert matcher.accepting, MINI.decode(ids)
    return MINI.decode(ids, skip_control=False)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(8))
def test_every_walk_of_a_schema_validates_and_is_compact(seed):
    text = walk(GrammarSpec("json_schema", json.dumps(SCHEMA)), seed)
    value = json.loads(text)
    jsonschema.validate(value, SCHEMA)
    assert not re.search(r"[,:{}\[\]]\s", text.replace(json.dumps(value["name"], ensure_ascii=False), ""))


@pytest.mark.parametrize("seed", range(4))
def test_every_walk_of_an_expression_matches(seed):
    pattern = r"(ab|c[0-9]{2}){1,4}-(yes|no)"
    assert re.fullmatch(pattern, walk(GrammarSpec("regex", pattern), seed))


def test_lark():
    assert walk(GrammarSpec("lark", 'start: "a" ("b" | "c")'), 1) in ("ab", "ac")


def test_empty_schema_text_means_any_object():
    assert {MINI.token_bytes(i)[:1] for i in options(COMPILER.compile(GrammarSpec("json_schema", "")))} == {b"{"}


def test_special_tokens_never_stand_in_text():
    matcher = COMPILER.compile(GrammarSpec("regex", "(.|\\n)*"))
    assert set(options(matcher)) & set(MINI.added_ids) == set(MINI.eos_ids)


def test_reasoning_comes_first_and_stays_free():
    spec = GrammarSpec("json_schema", '{"type":"integer"}', after="</think>")
    matcher, close = COMPILER.compile(spec), MINI.special_id("</think>")
    allowed = options(matcher)
    assert close in allowed and 1 not in allowed and len(allowed) > 3000
    assert set(allowed) & set(MINI.added_ids) == {close}
    for token in MINI.encode("a {thought} </thin"):
        matcher.consume(token)
    assert not matcher.accepting
    matcher.consume(close)
    assert {MINI.token_bytes(i)[:1] for i in options(matcher)} <= set(b"-0123456789"[i : i + 1] for i in range(11))
    for token in MINI.encode("42"):
        matcher.consume(token)
    assert matcher.accepting
    steps = len(MINI.encode("a {thought} </thin")) + 1 + len(MINI.encode("42"))
    matcher.rollback(steps)
    assert set(options(matcher)) == set(allowed)
    with pytest.raises(ValueError, match="count"):
        matcher.rollback(1)


def test_refused_token_leaves_the_state():
    matcher = COMPILER.compile(GrammarSpec("regex", "abc"))
    before = options(matcher)
    with pytest.raises(ValueError, match="token_id"):
        matcher.consume(MINI.encode("z")[0])
    assert (options(matcher) == before).all()
    good = MINI.encode("abc")
    assert matcher.allowed([*good, 5]) == len(good)
    assert (options(matcher) == before).all()


def test_end_only_when_finished():
    matcher = COMPILER.compile(GrammarSpec("regex", "ab?"))
    assert not matcher.accepting
    matcher.consume(MINI.encode("a")[0])
    assert matcher.accepting and not matcher.stopped and 1 in options(matcher)
    matcher.consume(MINI.encode("b")[0])
    assert matcher.stopped and list(options(matcher)) == [1]


BAD = {
    "open bracket": GrammarSpec("regex", "(("),
    "look-around": GrammarSpec("regex", "(?=a)b"),
    "empty set": GrammarSpec("regex", "[^\\x00-\\U0010FFFF]"),
    "not JSON": GrammarSpec("json_schema", "{"),
    "no schema": GrammarSpec("json_schema", "[]"),
    "no value": GrammarSpec("json_schema", "false"),
    "bounds": GrammarSpec("json_schema", '{"type":"integer","minimum":5,"maximum":1}'),
    "lengths": GrammarSpec("json_schema", '{"type":"string","minLength":5,"maxLength":2}'),
    "empty enum": GrammarSpec("json_schema", '{"enum":[]}'),
    "two types": GrammarSpec("json_schema", '{"allOf":[{"type":"string"},{"type":"integer"}]}'),
    "unsupported": GrammarSpec("json_schema", '{"type":"array","uniqueItems":true}'),
    "list without end": GrammarSpec(
        "json_schema", '{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}'
    ),
    "reference to itself": GrammarSpec("json_schema", '{"$ref":"#/$defs/d","$defs":{"d":{"$ref":"#/$defs/d"}}}'),
    "dead end behind an option": GrammarSpec(
        "json_schema",
        '{"type":"object","properties":{"a":{"$ref":"#/$defs/d"}},"$defs":{"d":{"allOf":[{"$ref":"#/$defs/d"}]}}}',
    ),
    "deep": GrammarSpec("json_schema", "[" * 100_000),
    "rule": GrammarSpec("lark", "start: nothing"),
    "large": GrammarSpec("regex", "a" * (MAX_TEXT + 1)),
    "kind": GrammarSpec("ebnf", "a"),
    "after": GrammarSpec("regex", "a", after="<nothing>"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_grammars_are_refused_with_a_reason(name):
    with pytest.raises(ValueError, match="grammar") as caught:
        COMPILER.compile(BAD[name])
    assert len(str(caught.value)) < 400


def test_recursion_with_an_end_is_fine():
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}}
    text = walk(
        GrammarSpec("json_schema", json.dumps({**tree, "required": ["kids"], "additionalProperties": False})), 5
    )
    assert text.startswith('{"kids":[')


@pytest.mark.parametrize("after", [None, "</think>"])
def test_giving_up_is_said(after):
    matcher = COMPILER.compile(GrammarSpec("regex", "abc", after))
    matcher._current.consume_token(2)  # behind the matcher's back: the grammar engine now is in its error state
    assert matcher.error and not matcher.accepting
    with pytest.raises(RuntimeError, match="grammar"):
        options(matcher)


def test_bad_rows_are_refused():
    matcher = COMPILER.compile(GrammarSpec("regex", "a"))
    with pytest.raises(ValueError, match="row"):
        matcher.fill_mask(np.zeros(WIDTH, np.int64))
    with pytest.raises(ValueError):
        matcher.fill_mask(np.zeros(WIDTH - 1, np.int32))


def test_tensor_rows():
    torch = pytest.importorskip("torch")
    row = torch.zeros(2, WIDTH, dtype=torch.int32)
    COMPILER.compile(GrammarSpec("regex", "a")).fill_mask(row[1])
    assert not row[0].any() and row[1].any()


def test_cache_is_bounded_and_shared_by_threads():
    compiler = GrammarCompiler(MINI, cache_size=3)
    failures = []

    def work(number):
        try:
            for i in range(12):
                matcher = compiler.compile(GrammarSpec("regex", f"x{(i + number) % 6}"))
                matcher.consume(MINI.encode("x")[0])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(compiler._cache) == 3
