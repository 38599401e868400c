"""Made-up conversations against the server's own conversion and deepseek-recipe's parser."""

import ast
import json
import random
import re

import deepseek_recipe as recipe
import pytest
from jsonschema import validate

from orchestrator.corpus.chat import arithmetic, json_answers, python_code, python_library, small_talk, tools
from orchestrator.corpus.conversations import Encoder, make_chat, to_recipe
from orchestrator.corpus.heldout import MODULES
from orchestrator.engine.grammar import GrammarCompiler
from orchestrator.server import ServerSettings
from orchestrator.server.api import CHAT
from orchestrator.server.convert import Converter
from orchestrator.text import bundled_tokenizer

MODEL = "v41-mini"


@pytest.fixture(scope="module")
def tokenizer():
    return bundled_tokenizer(MODEL)


@pytest.fixture(scope="module")
def converters(tokenizer):
    grammars = GrammarCompiler(tokenizer)
    return {
        thinking: Converter(tokenizer, ServerSettings(thinking=thinking, max_context=65536), grammars)
        for thinking in (False, True)
    }


def chats(count, wanted=lambda chat: True, seed="test"):
    made = (make_chat(random.Random(f"{seed}/{i}")) for i in range(20_000))
    found = [chat for _, chat in zip(range(count), filter(wanted, made), strict=False)]
    assert len(found) == count
    return found


def body(chat, *, until_call=False):
    """The chat as a client would send it, up to where the model has to write."""
    messages = [{"role": "system", "content": chat.system}] if chat.system else []
    for number, step in enumerate(chat.steps):
        messages.append({"role": "user", "content": step.question})
        if step.calls and until_call:
            break
        if step.calls:
            calls = [
                {
                    "id": f"call_{number}_{i}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for i, call in enumerate(step.calls)
            ]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            if chat.thinking:
                messages[-1]["reasoning_content"] = step.thought
            messages += [
                {"role": "tool", "tool_call_id": f"call_{number}_{i}", "content": call.result}
                for i, call in enumerate(step.calls)
            ]
        if step is not chat.steps[-1]:
            messages.append({"role": "assistant", "content": step.answer})
            if chat.thinking:
                messages[-1]["reasoning_content"] = step.last_thought or step.thought
    made = {"model": MODEL, "messages": messages}
    if chat.tools:
        made["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in chat.tools
        ]
    if chat.schema == {}:
        made["response_format"] = {"type": "json_object"}
    elif chat.schema:
        made["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": chat.schema}}
    return made


def parsed(prepared, tokenizer, ids):
    """The message that the server makes of an answer."""
    assert ids[-1] == tokenizer.eos_ids[0]
    generator = CHAT.generator(prepared.converted, "chatcmpl-1", MODEL, prepared.extra)
    parser = recipe.StreamProcessor(generator, prepared.converted.parsing_options, tokenizer.recipe)
    whole = CHAT.collector("chatcmpl-1", MODEL, 1, 0)
    usage = recipe.PromptUsage(prompt_tokens=1, prompt_cache_hit_tokens=0)
    chunks = [recipe.InferenceChunk.ready(prompt_usage=usage)]
    chunks += [recipe.InferenceChunk.tokens([token]) for token in ids[:-1]]
    chunks.append(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    for events in (*(parser.push(chunk) for chunk in chunks), parser.finish()):
        for event in events:
            whole.accumulate(event)
    return json.loads(whole.to_json())["choices"][0]["message"]


def test_prompt_and_answer_are_what_the_server_renders_and_parses(tokenizer, converters):
    encoder = Encoder(tokenizer)
    for chat in chats(150):
        prepared = converters[chat.thinking].prepare(CHAT, json.dumps(body(chat)).encode())
        assert encoder.prompt(chat) == prepared.prompt, chat
        assert encoder(chat) == prepared.prompt + encoder.answer(chat)
        message = parsed(prepared, tokenizer, encoder.answer(chat))
        assert message["content"] == chat.steps[-1].answer
        assert not message.get("tool_calls")
        thought = chat.steps[-1].last_thought or chat.steps[-1].thought
        assert (message.get("reasoning_content") or "") == (thought if chat.thinking else "")


def test_calls_parse_back(tokenizer, converters):
    encoder, eos = Encoder(tokenizer), tokenizer.eos_ids[0]
    for chat in chats(60, lambda chat: any(step.calls for step in chat.steps)):
        prepared = converters[chat.thinking].prepare(CHAT, json.dumps(body(chat, until_call=True)).encode())
        whole, start = encoder(chat), len(prepared.prompt)
        assert whole[:start] == prepared.prompt
        turn = whole[start : whole.index(eos, start) + 1]
        message = parsed(prepared, tokenizer, turn)
        called = [call["function"] for call in message["tool_calls"]]
        step = next(step for step in chat.steps if step.calls)
        assert [(c["name"], json.loads(c["arguments"])) for c in called] == [(c.name, c.arguments) for c in step.calls]
        offered = {tool.name: tool.parameters for tool in chat.tools}
        for call in step.calls:
            validate(call.arguments, offered[call.name])


def test_without_thinking_the_whole_is_what_the_recipe_renders(tokenizer):
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer.recipe)
    for chat in chats(100, lambda chat: not chat.thinking):
        assert Encoder(tokenizer)(chat) == encoding.encode(to_recipe(chat))[:-2]


def test_a_thought_stands_between_its_marks(tokenizer):
    encoder = Encoder(tokenizer)
    for chat in chats(20, lambda chat: chat.thinking and not chat.tools):
        text = tokenizer.decode(encoder(chat), skip_control=False)
        assert f"<think>{chat.steps[-1].thought}</think>{chat.steps[-1].answer}" in text
        assert chat.steps[-1].thought


def test_kinds_and_variety(tokenizer):
    made = chats(3000)
    shares = {
        "thinking": sum(chat.thinking for chat in made),
        "tools": sum(bool(chat.tools) for chat in made),
        "json": sum(chat.schema is not None for chat in made),
        "several turns": sum(len(chat.steps) > 1 for chat in made),
    }
    for name, count in shares.items():
        assert 100 < count < 1500, name
    encoder = Encoder(tokenizer)
    assert len({tuple(encoder(chat)) for chat in made}) > 2800


def test_sums_are_right():
    checked = 0
    for i in range(2000):
        it = arithmetic.arithmetic(random.Random(i))
        found = re.fullmatch(
            r"(?:What is |Calculate |Compute )?(\d+ [-+*] \d+)(?:\?|\.|, please\.| = \?)?", it.question
        )
        if found:
            assert str(eval(found[1])) in re.findall(r"-?\d+", it.answer), it
            checked += 1
    assert checked > 100


def test_json_answers_obey_their_schemas():
    for i in range(500):
        chat = json_answers.json_chat(random.Random(i))
        answer = json.loads(chat.steps[-1].answer)
        assert answer
        if chat.schema:
            validate(answer, chat.schema)
    with pytest.raises(Exception, match="required"):
        validate({}, json_answers.schema_of({"a": 1}))


def test_functions_compile_and_broken_ones_differ():
    for it in python_code.functions():
        ast.parse(it.code)
        assert it.purpose and it.how.endswith(".") and it.name
    for i in range(300):
        it = python_code.fix_code(random.Random(i))
        blocks = [part.strip("\n") for part in it.question.split("```python")[1:] + it.answer.split("```python")[1:]]
        if len(blocks) == 2:
            ast.parse(blocks[1].removesuffix("```"))
            assert blocks[0] != blocks[1]


def test_nothing_is_quoted_from_held_out_modules():
    names = {entry.name for entry in python_library.entries()}
    assert "math.sqrt" in names and "asyncio.Event.set" in names
    assert not names & {"asyncio.Queue", "asyncio.Queue.get", "json.JSONEncoder", "shutil.copy"}
    assert not {name.removesuffix(".py").replace("/", ".") for name in MODULES} & set(python_library.MODULES)


def test_the_model_knows_its_name():
    answers = [answers for questions, answers in small_talk.pairs() if "Who are you?" in questions]
    assert answers and all("v41-mini" in answer and "Fathom" in answer for answer in answers[0])


def test_every_tool_is_used_somewhere():
    used = {call.name for i in range(1500) for step in tools.tool_chat(random.Random(i)).steps for call in step.calls}
    assert used == {tool.name for tool in tools.ALL}
