"""Grammar of the model's tool calls: the DSML block, with arguments that obey each tool's schema.

A call block reads ``<｜DSML｜ calls>``, one ``invoke`` element a call with one ``parameter`` element an argument,
``</｜DSML｜ calls>``. Strings stand in it as they are (``string="true"``), everything else as compact JSON. The DSML
mark is one token of the vocabulary, so text can never be taken for markup.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from orchestrator.engine.grammar import anything_but
from orchestrator.engine.request import GrammarSpec
from orchestrator.engine.schema_check import check_finite
from orchestrator.text.specials import DSML
from orchestrator.text.tokenizer import Tokenizer

Mode = Literal["optional", "required", "opened"]
_CONSTRAINTS = {"pattern", "format", "minLength", "maxLength", "enum", "const", "not", "allOf"}


def tool_call_grammar(
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]],
    *,
    mode: Mode = "optional",
    parallel: bool = True,
    answer_schema: dict[str, Any] | None = None,
    after: str | None = None,
) -> GrammarSpec:
    """Lark grammar for one answer that may, or must, call tools.

    Args:
        tokenizer: vocabulary with the DSML mark.
        tools: function tools, ``{"type": "function", "function": {"name", "parameters", "strict"}}``.
        mode: "optional" text or calls; "required" calls; "opened" calls, whose block the prompt has already opened.
        parallel: allow more than one call.
        answer_schema: JSON schema of an answer without calls; None allows any text, also before calls.
        after: special token that opens the constrained part (`GrammarSpec.after`).

    Raises ValueError for tools that the call format cannot express.
    """
    mark = tokenizer.special_id(DSML)
    if mark is None:
        raise ValueError(f"tokenizer: has no {DSML} token, so tool calls cannot be constrained")
    if not tools:
        raise ValueError("tools: got none, allowed is at least one")
    return GrammarSpec("lark", _Builder(f"<[{mark}]>").grammar(tools, mode, parallel, answer_schema), after)


class _Builder:
    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._rules: list[str] = []

    def grammar(self, tools: list[dict], mode: Mode, parallel: bool, answer: dict | None) -> str:
        invokes = [self._invoke(index, tool["function"]) for index, tool in enumerate(tools)]
        calls = f'invoke{"+" if parallel else ""} "</" {self._mark} " calls>"'
        opened = f'{self._mark} " calls>\\n" {calls}'
        if mode == "opened":
            start = calls
        elif mode == "required":
            start = f'SPACE? "<" {opened}'
        elif answer is not None:
            start = f'%json {_json(answer, strict=True)} | SPACE? "<" {opened}'
        else:
            start = f"TEXT | TEXT_LT {opened}"
        head = [f"start: {start}", f"invoke: {' | '.join(invokes)}"]
        terminals = [f"TEXT: {anything_but(DSML)}", f"TEXT_LT: {anything_but(DSML, '<')}"]
        terminals += [f"VALUE: {anything_but(DSML, '</')}", 'NAME: /[^"<>\\n]+/', "SPACE: /\\n{1,2}/"]
        return "\n".join([*head, *self._rules, *terminals]) + "\n"

    def _invoke(self, index: int, function: dict[str, Any]) -> str:
        name, schema = function["name"], function.get("parameters") or {}
        strict = bool(function.get("strict"))
        rule = f"invoke_{index}"
        if schema.get("properties"):
            needed = set(schema.get("required") or ())
            items = schema["properties"].items()
            parts = [
                self._parameter(f"{rule}_{i}", key, _with_definitions(value, schema), strict)
                + ("" if key in needed else "?")
                for i, (key, value) in enumerate(items)
            ]
            arguments = " ".join(parts)
        elif schema.get("additionalProperties") is False:
            arguments = ""
        else:
            arguments = f"{self._parameter(f'{rule}_any', None, {}, strict)}*"
        head = _literal(f" invoke name={_attribute('tool', name)}>\n")
        self._rules.append(f'{rule}: "<" {self._mark} {head} {arguments} "</" {self._mark} " invoke>\\n"')
        return rule

    def _parameter(self, rule: str, key: str | None, schema: Any, strict: bool) -> str:
        fixed = _literal(f" parameter name={_attribute('parameter', key)}") if key is not None else None
        name = fixed or '" parameter name=\\"" NAME "\\""'
        schema = schema if isinstance(schema, dict) else {}
        forms = []
        if words := _words(schema):
            choices = " | ".join(_literal(word) for word in words)
            forms.append(f'" string=\\"true\\">" ({choices}) "</"')
        elif _takes_text(schema):
            forms.append('" string=\\"true\\">" VALUE')
        if not words and not _is_text(schema):
            forms.append(f'" string=\\"false\\">" %json {_json(schema, strict)} "</"')
        self._rules.append(f'{rule}: "<" {self._mark} {name} ({" | ".join(forms)}) {self._mark} " parameter>\\n"')
        return rule


def _is_text(schema: dict[str, Any]) -> bool:
    """A string without further conditions. One with conditions is written as JSON, which can enforce them."""
    return schema.get("type") == "string" and not _CONSTRAINTS & schema.keys()


def _takes_text(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", ["string"] if not schema.keys() & {"anyOf", "oneOf", "$ref"} else [])
    if "string" in (kinds if isinstance(kinds, list) else [kinds]) and not _CONSTRAINTS & schema.keys():
        return True
    return any(_is_text(branch) for branch in schema.get("anyOf") or () if isinstance(branch, dict))


def _words(schema: dict[str, Any]) -> list[str]:
    """The strings that a schema lists one by one, or none if it is no such list or they cannot stand as they are."""
    words: Any = [schema["const"]] if "const" in schema else schema.get("enum")
    plain = isinstance(words, list) and all(isinstance(word, str) and word and DSML not in word for word in words)
    return words if plain else []


def _with_definitions(schema: Any, root: dict[str, Any]) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def _json(schema: dict[str, Any], strict: bool) -> str:
    check_finite(schema)
    options = {"whitespace_flexible": False, "lenient": not strict, "coerce_one_of": not strict}
    return json.dumps({**schema, "x-guidance": options})


def _attribute(what: str, name: str) -> str:
    if any(char in name for char in '"<>\n\r') or not name:
        raise ValueError(f"tools: {what} name {name!r} cannot be written in a call, allowed is no quote, < or >")
    return f'"{name}"'


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
