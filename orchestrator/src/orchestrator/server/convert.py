"""From a request body to token ids and sampling parameters. Runs in worker threads: it costs CPU, not waiting."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import deepseek_recipe as recipe

from orchestrator.engine.grammar import GrammarCompiler
from orchestrator.engine.image_spans import PlacedImage
from orchestrator.engine.request import GrammarSpec, SamplingParams
from orchestrator.engine.tool_grammar import tool_call_grammar
from orchestrator.model.vision.image import PreparedImage
from orchestrator.server.api import RESPONSES, Api, ResponseExtra, forced_call, messages_schema, parallel_calls
from orchestrator.server.errors import ApiError
from orchestrator.server.fields import Extras, check_fields, in_recipe_words
from orchestrator.server.settings import ServerSettings
from orchestrator.text.specials import THINK_END
from orchestrator.text.tokenizer import Tokenizer
from orchestrator.vision import ImageReader, ImageRefused, place

_T = TypeVar("_T")


@dataclass(frozen=True)
class Prepared:
    """A request that is ready for the engine. Whoever encodes `images` empties the list, for their memory."""

    model: str
    prompt: list[int]
    params: SamplingParams
    stream: bool
    converted: recipe.ConversationRequest
    extra: ResponseExtra
    images: list[PlacedImage] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class AwaitsImages(Generic[_T]):
    """A request whose images have to be read first, which may take the time of a download. `finish` does the rest."""

    sources: Sequence[recipe.ImageSource]
    finish: Callable[[list[PreparedImage]], _T]


class Converter:
    """Holds what conversion needs. Thread-safe. Without `images` requests with images are refused."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        grammars: GrammarCompiler | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self._tokenizer, self._settings, self._images = tokenizer, settings, images
        self._grammars = grammars or GrammarCompiler(tokenizer)
        flash = recipe.ModelVersion.DeepseekV41Flash
        options = recipe.ConversionOptions(default_thinking_mode=settings.thinking)
        options = options.with_model_versions_by_name(dict.fromkeys(settings.names, flash))
        self._options = options.with_special_tokens(tokenizer.recipe_specials)
        encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer.recipe)
        self._encoding = encoding.with_special_tokens(tokenizer.recipe_specials)

    def prepare(self, api: Api, raw: bytes) -> Prepared | AwaitsImages[Prepared]:
        """Raises ApiError 400 (or the recipe's own status) for a body that cannot be served as it asks."""
        return _guarded(lambda: self._prepare(api, raw))

    def count_tokens(self, api: Api, raw: bytes) -> int | AwaitsImages[int]:
        """Prompt tokens of a request, whether or not it would fit. Raises as `prepare`."""
        return _guarded(lambda: self._count_tokens(api, raw))

    def read_images(self, sources: Sequence[recipe.ImageSource]) -> list[PreparedImage]:
        """What `AwaitsImages.finish` takes. Raises ApiError 400 or 413. It waits for the network."""
        assert self._images is not None
        reader = self._images
        return _guarded(lambda: reader.read(sources))

    def _count_tokens(self, api: Api, raw: bytes) -> int | AwaitsImages[int]:
        body = parse_object(raw)
        body = {"max_tokens": 1, **body}
        check_fields(api.name, body)
        tokens, sources = self._encode(api.request(body).convert(self._options))
        if not sources:
            return len(tokens)
        return AwaitsImages(sources, lambda images: _guarded(lambda: len(self._place(tokens, images)[0])))

    def _prepare(self, api: Api, raw: bytes) -> Prepared | AwaitsImages[Prepared]:
        body = parse_object(raw)
        extras = check_fields(api.name, body)
        request = api.request(in_recipe_words(body, extras) or raw)
        model, extra = request.model, ResponseExtra()
        if api is RESPONSES:
            extra = ResponseExtra(request.echo(), request.namespace_tool_map(self._options))
        converted = request.convert(self._options)
        tokens, sources = self._encode(converted)

        def finish(images: list[PreparedImage]) -> Prepared:
            prompt, placed = self._place(tokens, images)
            params = self._params(api, body, extras, converted, len(prompt))
            return Prepared(model, prompt, params, converted.stream, converted, extra, placed)

        return AwaitsImages(sources, lambda images: _guarded(lambda: finish(images))) if sources else finish([])

    def _params(
        self, api: Api, body: dict[str, Any], extras: Extras, converted: recipe.ConversationRequest, length: int
    ) -> SamplingParams:
        """How to continue a prompt of so many tokens."""
        max_tokens = converted.resolve_max_tokens(length, self._settings.max_context)
        if converted.inference_options.max_tokens is None and self._settings.default_max_tokens is not None:
            max_tokens = min(max_tokens, self._settings.default_max_tokens)
        grammar = self._grammar(api, body, converted)
        return _sampling(converted.inference_options, extras, max_tokens, grammar)

    def _encode(self, converted: recipe.ConversationRequest) -> tuple[list[int], Sequence[recipe.ImageSource]]:
        """Token ids, and the sources of the images whose placeholders are among them, in order."""
        sources: Sequence[recipe.ImageSource] = ()
        if any(message.image_sources for message in converted.conversation.messages):
            if self._images is None:
                raise ValueError("this server takes text only; leave images out of the messages")
            sources = self._encoding.render_conversation(converted.conversation).image_sources
            self._images.check_count(len(sources))
        return self._encoding.encode(converted.conversation), sources

    def _place(self, tokens: list[int], images: list[PreparedImage]) -> tuple[list[int], list[PlacedImage]]:
        if self._images is None or not images:
            return tokens, []
        return place(tokens, images, self._images.image_token_id)

    def _grammar(self, api: Api, body: dict[str, Any], converted: recipe.ConversationRequest) -> GrammarSpec | None:
        """The constraint of a request, compiled once here so that a bad one is refused before it is queued."""
        constraint = converted.inference_options.output_constraint
        parsing, schema = converted.parsing_options, messages_schema(api, body)
        stage = parsing.thinking_initial_stage
        after = THINK_END if stage is not None and stage.starts_in_reasoning() else None
        if constraint is not None and constraint.kind.startswith("tool_call"):
            spec = self._tool_grammar(api, body, converted, schema, after)
        elif constraint is not None:
            kind = {"json": "json_schema", "regex": "regex"}[constraint.kind]
            spec = GrammarSpec(kind, constraint.schema, after)  # type: ignore[arg-type]
        elif schema is not None:
            spec = GrammarSpec("json_schema", json.dumps(schema), after)
        else:
            return None
        if spec is not None:
            self._grammars.compile(spec)
        return spec

    def _tool_grammar(
        self,
        api: Api,
        body: dict[str, Any],
        converted: recipe.ConversationRequest,
        schema: dict[str, Any] | None,
        after: str | None,
    ) -> GrammarSpec | None:
        constraint, conversation = converted.inference_options.output_constraint, converted.conversation
        assert constraint is not None
        if schema is None and conversation.response_format in ("json_object", "json_schema"):
            schema = conversation.response_schema or {"type": "object"}
        opened = converted.parsing_options.starts_in_tool_calls
        free = constraint.kind == "tool_call" and not forced_call(api, body)
        try:
            spec = tool_call_grammar(
                self._tokenizer,
                json.loads(constraint.schema),
                mode="opened" if opened else "optional" if free else "required",
                parallel=parallel_calls(api, body),
                answer_schema=schema,
                after=after,
            )
            self._grammars.compile(spec)
        except ValueError:
            if not free or schema is not None:
                raise
            return None  # a tool beyond the grammar's means: the model may still call it, unconstrained
        return spec


def _guarded(work: Callable[[], _T]) -> _T:
    """The result of `work`, its errors as the client is to see them."""
    try:
        return work()
    except recipe.ConversionError as error:
        raise ApiError(error.status_code, str(error), body=json.loads(error.body)) from None
    except ImageRefused as error:
        raise ApiError(error.status, f"Invalid request: {_one_line(error)}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise ApiError(400, f"Invalid request: {_one_line(error)}") from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object from bytes. Raises ValueError (RecursionError if nested too deeply) for anything else."""
    body = json.loads(raw, parse_constant=_no_constant)
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _sampling(
    options: recipe.InferenceOptions, extras: Extras, max_tokens: int, grammar: GrammarSpec | None
) -> SamplingParams:
    temperature, top_p = options.temperature, options.top_p
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=extras.top_k or 0,
        max_tokens=max_tokens,
        min_tokens=extras.min_tokens or 0,
        stop_token_ids=tuple(extras.stop_token_ids or ()),
        ignore_eos=bool(extras.ignore_eos),
        seed=options.seed if options.seed is not None else extras.seed,
        logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        grammar=grammar,
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:500] if text else type(error).__name__
