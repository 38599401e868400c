import json

import deepseek_recipe as recipe
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.engine.grammar import GrammarCompiler
from orchestrator.engine.tool_grammar import tool_call_grammar
from orchestrator.text import bundled_tokenizer

MINI = bundled_tokenizer("v41-mini")
COMPILER = GrammarCompiler(MINI)
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "where": {"$ref": "#/$defs/point"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "free", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "none", "parameters": {"type": "object", "additionalProperties": False}}},
]


def invoke(name, *arguments):
    lines = [f'<｜DSML｜ parameter name="{k}" string="{s}">{v}</｜DSML｜ parameter>\n' for k, s, v in arguments]
    return f'<｜DSML｜ invoke name="{name}">\n{"".join(lines)}</｜DSML｜ invoke>\n'


CALLS, END = "<｜DSML｜ calls>\n", "</｜DSML｜ calls>"
FULL = [("city", "true", "Paris"), ("days", "false", "3"), ("unit", "true", "C"), ("code", "false", '"FR"')]
FULL += [("where", "false", '{"x":1.5}'), ("note", "true", "no </b> hurry")]


def accepts(text: str, **how) -> bool:
    matcher = COMPILER.compile(tool_call_grammar(MINI, TOOLS, **how))
    ids = MINI.encode_with_specials(text)
    if matcher.allowed(ids) != len(ids):
        return False
    for token in ids:
        matcher.consume(token)
    return matcher.accepting


def parsed(text: str) -> list[dict]:
    """What deepseek-recipe reads in `text` after an opened call block."""
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "q"}], "tools": TOOLS}
    body |= {"tool_choice": "required", "thinking": {"type": "disabled"}}
    converted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    generator = recipe.ChatCompletionRequest.chunk_generator(converted, "id", "m")
    stream = recipe.StreamProcessor(generator, converted.parsing_options, MINI.recipe)
    response = recipe.ChatCompletionResponse("id", "m", 0, 1, 0)
    chunks = [recipe.InferenceChunk.ready(), recipe.InferenceChunk.tokens(MINI.encode_with_specials(text))]
    for chunk in [*chunks, recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)]:
        for event in stream.push(chunk):
            response.accumulate(event)
    for event in stream.finish():
        response.accumulate(event)
    return json.loads(response.to_json())["choices"][0]["message"]["tool_calls"]


def test_full_call_is_accepted_and_parses_to_valid_arguments():
    text = invoke("weather", *FULL) + invoke("none") + END
    assert accepts(text, mode="opened")
    first, second = parsed(text)
    arguments = json.loads(first["function"]["arguments"])
    jsonschema.validate(arguments, PARAMETERS)
    assert arguments["code"] == "FR" and arguments["note"] == "no </b> hurry" and arguments["unit"] == "C"
    assert second["function"] == {"name": "none", "arguments": "{}"}


@pytest.mark.parametrize("mode", ["optional", "required", "opened"])
def test_modes(mode):
    call = invoke("weather", FULL[0])
    block = CALLS + call + END
    assert accepts("just text < or so", mode=mode) == (mode == "optional")
    assert accepts(f"text\n\n{block}", mode=mode) == (mode == "optional")
    assert accepts(f"\n\n{block}", mode=mode) == (mode != "opened")
    assert accepts(call + END, mode=mode) == (mode == "opened")
    assert not accepts(block + "more", mode=mode)
    assert not accepts(END, mode=mode)


BAD_CALLS = {
    "unknown tool": invoke("other"),
    "missing argument": invoke("weather"),
    "wrong type": invoke("weather", FULL[0], ("days", "false", '"3"')),
    "below minimum": invoke("weather", FULL[0], ("days", "false", "0")),
    "not listed": invoke("weather", FULL[0], ("unit", "true", "K")),
    "pattern": invoke("weather", FULL[0], ("code", "false", '"fr"')),
    "unknown argument": invoke("weather", FULL[0], ("colour", "true", "red")),
    "arguments for none": invoke("none", FULL[0]),
    "nested definition": invoke("weather", FULL[0], ("where", "false", '{"x":"y"}')),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused(name):
    assert not accepts(BAD_CALLS[name] + END, mode="opened")


def test_one_call_only():
    two = invoke("none") * 2 + END
    assert accepts(two, mode="opened") and not accepts(two, mode="opened", parallel=False)


def test_answer_schema_beside_tools():
    how = {"answer_schema": {"type": "integer"}}
    assert accepts("42", **how) and accepts(CALLS + invoke("none") + END, **how) and not accepts("text", **how)


def test_reasoning_before_calls_and_no_mark_in_it():
    how = {"mode": "required", "after": "</think>"}
    assert accepts(f"I think</think>\n\n{CALLS}{invoke('none')}{END}", **how)
    assert not accepts(f"I think {CALLS}{invoke('none')}{END}", **how)


@given(value=st.text(max_size=20))
@settings(deadline=None, max_examples=50)
def test_any_string_value_without_the_mark_survives(value):
    ids = MINI.encode_with_specials(invoke("free", ("v", "true", "\0")) + END)
    cut = ids.index(MINI.encode("\0")[0])
    ids[cut : cut + 1] = MINI.encode(value)
    matcher = COMPILER.compile(tool_call_grammar(MINI, TOOLS, mode="opened"))
    assert matcher.allowed(ids) == len(ids)


def test_unwritable_names_and_missing_mark_are_refused():
    bad = [{"type": "function", "function": {"name": 'a"b', "parameters": {}}}]
    with pytest.raises(ValueError, match="tools"):
        tool_call_grammar(MINI, bad)
    with pytest.raises(ValueError, match="tools"):
        tool_call_grammar(MINI, [])
