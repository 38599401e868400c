"""Made-up conversations, encoded as the server encodes prompts: by deepseek-recipe, in the V4.1 format.

All of it comes from templates with slots, so answers to computed questions are right. Only what is said of the standard
library is quoted: from its docstrings.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import deepseek_recipe as recipe

from orchestrator.corpus.chat.arithmetic import arithmetic
from orchestrator.corpus.chat.exchange import Chat, Exchange, Step, Template
from orchestrator.corpus.chat.json_answers import json_chat
from orchestrator.corpus.chat.python_code import explain_code, fix_code, what_prints, write_code
from orchestrator.corpus.chat.python_library import library
from orchestrator.corpus.chat.reading import reading, remember
from orchestrator.corpus.chat.small_talk import small_talk
from orchestrator.corpus.chat.strings import evaluate, strings
from orchestrator.corpus.chat.tools import tool_chat
from orchestrator.text.specials import THINK_END
from orchestrator.text.tokenizer import Tokenizer

THINKING_SHARE = 0.15
SYSTEM_SHARE = 0.25
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are v41-mini, a small demonstration model of Fathom.",
    "You are a Python tutor. Answer briefly.",
    "Answer briefly.",
    "Be concise.",
    "You are a friendly assistant who knows Python.",
    "Give short and correct answers.",
    "You help people who learn to program.",
    "Answer in English.",
    "You are an assistant for simple questions.",
)
_TEMPLATES: dict[Template, float] = {
    small_talk: 16,
    arithmetic: 18,
    strings: 12,
    evaluate: 10,
    library: 20,
    write_code: 14,
    explain_code: 6,
    fix_code: 8,
    what_prints: 8,
    reading: 14,
}
_JSON_SHARE, _TOOL_SHARE, _REMEMBER_SHARE = 0.12, 0.14, 0.03


def make_chat(rng: random.Random) -> Chat:
    """A conversation of one of the kinds: questions and answers, an answer in JSON, tools."""
    kind = rng.random()
    if kind < _JSON_SHARE:
        chat = json_chat(rng)
    elif kind < _JSON_SHARE + _TOOL_SHARE:
        chat = tool_chat(rng)
    elif kind < _JSON_SHARE + _TOOL_SHARE + _REMEMBER_SHARE:
        between = [small_talk(rng) for _ in range(rng.randint(0, 2))]
        chat = Chat(remember(rng, [Step(it.question, it.answer) for it in between]))
    else:
        return _questions(rng)
    return replace(chat, thinking=bool(chat.steps[0].thought) and rng.random() < THINKING_SHARE)


def to_recipe(chat: Chat, *, last: bool = True) -> recipe.Conversation:
    """The conversation as deepseek-recipe takes it, with or without the last answer."""
    messages: list[recipe.Message] = [recipe.SystemMessage(chat.system)] if chat.system else []
    for number, step in enumerate(chat.steps):
        thought = step.thought if chat.thinking else None
        messages.append(recipe.UserMessage(step.question))
        if step.calls:
            ids = [f"call_{number}_{i}" for i in range(len(step.calls))]
            calls = [
                recipe.ToolCall(i, call.name, json.dumps(call.arguments))
                for i, call in zip(ids, step.calls, strict=True)
            ]
            messages.append(recipe.AssistantMessage("", thought, calls))
            messages += [recipe.ToolMessage(call.result, i) for i, call in zip(ids, step.calls, strict=True)]
            thought = step.last_thought if chat.thinking else None
        messages.append(recipe.AssistantMessage(step.answer, thought))
    tools = [recipe.ToolDefinition(tool.name, tool.description, tool.parameters) for tool in chat.tools]
    return recipe.Conversation(
        messages if last else messages[:-1],
        thinking_mode=chat.thinking,
        tools=tools or None,
        response_format="json_object" if chat.schema == {} else "text",
        response_schema=chat.schema or None,
    )


class Encoder:
    """Token ids of conversations."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer.recipe)
        self._encoding = encoding.with_special_tokens(tokenizer.recipe_specials)
        self._tokenizer = tokenizer

    def prompt(self, chat: Chat) -> list[int]:
        """Ids up to where the model has to write the last answer: what the server hands to the engine."""
        return self._encoding.encode(to_recipe(chat, last=False))

    def answer(self, chat: Chat) -> list[int]:
        """Ids that the model has to write then, EOS included."""
        step, encode = chat.steps[-1], self._tokenizer.encode
        ids: list[int] = []
        if chat.thinking:
            ids = [*encode(step.last_thought if step.calls else step.thought), self._id(THINK_END)]
        return [*ids, *encode(step.answer), *self._tokenizer.eos_ids]

    def __call__(self, chat: Chat) -> list[int]:
        """The whole conversation, BOS to EOS.

        Prompt and answer are put together here, because the recipe leaves the reasoning of finished turns out.
        """
        return self.prompt(chat) + self.answer(chat)

    def _id(self, spelling: str) -> int:
        found = self._tokenizer.special_id(spelling)
        assert found is not None, spelling
        return found


def _questions(rng: random.Random) -> Chat:
    templates, weights = list(_TEMPLATES), list(_TEMPLATES.values())
    count = rng.choices((1, 2, 3, 4), (60, 22, 12, 6))[0]
    exchanges: list[Exchange] = [template(rng) for template in rng.choices(templates, weights, k=count)]
    # Of several thoughts the format would drop all but the last.
    thinking = len(exchanges) == 1 and bool(exchanges[0].thought) and rng.random() < 2 * THINKING_SHARE
    steps = tuple(Step(it.question, it.answer, it.thought) for it in exchanges)
    system = rng.choice(_SYSTEMS) if rng.random() < SYSTEM_SHARE else ""
    return Chat(steps, system, thinking)
