"""Whatever arrives, the answer is never a 5xx."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
SCALARS = st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3))
FIELDS = [
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stop_sequences",
    "tools",
    "tool_choice",
    "response_format",
    "text",
    "stream",
    "seed",
    "logprobs",
    "top_logprobs",
    "n",
    "reasoning",
    "reasoning_effort",
    "thinking",
    "include",
    "metadata",
    "system",
    "instructions",
    "output_config",
    "output_format",
    "stream_options",
    "user",
    "parallel_tool_calls",
    "top_k",
    "min_tokens",
    "stop_token_ids",
    "input",
    "messages",
]
GOOD = {"model": "v41-mini", "messages": [{"role": "user", "content": "json"}], "max_tokens": 5}


def test_requests_made_from_the_published_schema(rig):
    published = schemathesis.openapi.from_asgi("/openapi.json", rig.app)
    operations = [found.ok() for found in published.get_all_operations()]
    assert {operation.path for operation in operations} >= set(PATHS)
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(QUICK, max_examples=5)
        def probe(case):
            response = case.call(headers={"host": "localhost"})
            assert response.status_code < 500, response.text

        probe()


@pytest.mark.parametrize("path", PATHS)
@given(body=st.binary(max_size=200))
@QUICK
def test_bytes(rig, path, body):
    assert rig.client.post(path, content=body).status_code == 400


@pytest.mark.parametrize("path", PATHS)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=4))
@QUICK
def test_wrong_values_in_known_fields(rig, path, fields):
    good = {"model": "v41-mini", "input": "json", "max_output_tokens": 5} if path == PATHS[1] else GOOD
    body = json.dumps({**good, **fields})
    assert rig.client.post(path, content=body).status_code in (200, 400)


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
    optional={
        "content": st.text(max_size=8) | st.lists(VALUES, max_size=2) | st.none(),
        "tool_calls": VALUES,
        "tool_call_id": VALUES,
        "reasoning_content": st.text(max_size=4),
        "prefix": st.booleans(),
        "name": SCALARS,
    },
)


@pytest.mark.parametrize("path", PATHS)
@given(messages=st.lists(MESSAGE, max_size=4))
@QUICK
def test_odd_conversations(rig, path, messages):
    field = "input" if path == PATHS[1] else "messages"
    body = {"model": "v41-mini", field: messages} | ({} if path == PATHS[1] else {"max_tokens": 5})
    assert rig.client.post(path, content=json.dumps(body)).status_code in (200, 400)


SCHEMA = st.recursive(
    st.sampled_from(
        [{}, {"type": "string"}, {"type": "integer", "minimum": 3}, {"enum": [1]}, {"not": {}}, True, False]
    ),
    lambda s: (
        st.builds(lambda v: {"type": "object", "properties": {"a": v}, "required": ["a"]}, s)
        | st.builds(lambda v: {"type": "array", "items": v, "maxItems": 2}, s)
        | st.builds(lambda v, w: {"anyOf": [v, w]}, s, s)
        | st.builds(lambda v: {"$ref": "#/$defs/d", "$defs": {"d": v}}, s)
    ),
    max_leaves=6,
)


@given(schema=SCHEMA, thinking=st.booleans(), tool=st.booleans())
@QUICK
def test_odd_schemas(rig, schema, thinking, tool):
    body = {**GOOD, "thinking": {"type": "enabled" if thinking else "disabled"}}
    if tool:
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    else:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert rig.client.post(PATHS[0], json=body).status_code in (200, 400)
