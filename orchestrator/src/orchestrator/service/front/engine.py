"""The service as an engine: what `server` asks for, carried out by the workers behind an entry."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Iterable
from itertools import count
from typing import Any

from orchestrator.cache.chain import ImageRun
from orchestrator.engine.async_engine import Progress
from orchestrator.engine.grammar import GrammarCompiler
from orchestrator.engine.image_spans import PlacedImage
from orchestrator.engine.request import EngineFull, Event, Finished, SamplingParams
from orchestrator.model.config import ModelConfig
from orchestrator.roles.entry import Entry
from orchestrator.roles.messages import Deliver, DeliverReady, RequestSpec
from orchestrator.roles.settings import Settings
from orchestrator.service.config import ServiceConfig
from orchestrator.service.front.answer import Answer
from orchestrator.service.front.checks import Checks
from orchestrator.service.front.entry_loop import Delivery, EntryLoop, Sender
from orchestrator.service.front.known_prefixes import KnownPrefixes
from orchestrator.service.front.shelf import Shelf
from orchestrator.service.front.streams import Streams
from orchestrator.service.pixels import pack
from orchestrator.service.spec import Place, encode_params
from orchestrator.service.times import role_settings
from orchestrator.text.tokenizer import Tokenizer

_EXPECTED_OUTPUT = 256  # tokens that placement plans with at most
_SHELF_BYTES = 1 << 30


class Draining(EngineFull):
    """The service takes no new requests, since it is about to end."""

    status = 503


class ClusterEngine:
    """`AsyncEngineProtocol` over the workers of a service. `start` it once its post delivers to `loop.take`.

    Args:
        post: what sends messages to the parties of the service.
        settings: times of the roles; None takes those of `config`.
        name: of the entry's party.
        grammars: a compiler for the tokenizer's vocabulary, if there is one already.
        shelf_bytes: of pixels of running requests' images.

    Attributes:
        loop: drives the entry. shelf: images that encoders may ask for. grammars: None without tokenizer.
        context: longest request in tokens. takes_images: the service has encoders, and the model is made for them.
        prefixes: what the workers' common store has, as far as it is known here; None without one.
        failed: why the service cannot work, None if it can. The supervisor may set it, and take it back.
    """

    image_counters = None

    def __init__(
        self,
        post: Sender,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        config: ServiceConfig,
        settings: Settings | None = None,
        *,
        name: str = "entry",
        grammars: GrammarCompiler | None = None,
        shelf_bytes: int = _SHELF_BYTES,
    ) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.checks = Checks(model, config, has_tokenizer=tokenizer is not None)
        self.context, self.takes_images = self.checks.context, self.checks.takes_images
        self.grammars = grammars or (None if tokenizer is None else GrammarCompiler(tokenizer))
        self.shelf = Shelf(shelf_bytes)
        shared = config.store.kind != "none" and config.engine.prefix_cache != "off"
        self.prefixes = KnownPrefixes() if shared else None
        self.failed: str | None = None
        self._eos = frozenset({model.eos_token_id, *(() if tokenizer is None else tokenizer.eos_ids)})
        self.entry = Entry(name, settings or role_settings(config))
        self.loop = EntryLoop(
            self.entry,
            post,
            deliver=lambda deliveries: self._streams.deliver(deliveries),
            pixels=self._pixels,
            failed=self._fail,
        )
        self._streams = Streams(self.loop.request, self.loop.cancel)
        # Clients may use an id again, and another front may have had the same ones: the roles' ids never return.
        self._life, self._count = secrets.token_hex(6), count(1)
        self._taking, self._closed = True, False

    def start(self) -> None:
        """Begin to take messages. Requests may come before; they wait."""
        self.loop.start()

    @property
    def progress(self) -> Progress:
        """May be read from any thread. A step is a turn of the loop that delivered something."""
        streams = self._streams
        return Progress(streams.live, streams.last, streams.steps, streams.running, streams.waiting, self.failed)

    @property
    def idle(self) -> bool:
        """Whether no request is open."""
        return self._streams.idle

    def status(self) -> dict[str, Any]:
        """Numbers of the entry."""
        entry = self.entry
        return {
            "live": len(entry.live),
            "received": entry.received,
            "outcomes": dict(entry.outcomes),
            "dropped": {**entry.dropped, **self.loop.counts},
        }

    async def generate(
        self, request_id: str, prompt: list[int], params: SamplingParams, images: Iterable[PlacedImage] = ()
    ) -> AsyncGenerator[Event, None]:
        """Events of one request, `Finished` last. Closing the iterator early cancels it at all workers.

        `Ready` comes with the first token. A list of `images` is emptied once they are on the shelf, where they stay
        until the request ends.

        Raises:
            ValueError: it can never run, or its id is in use.
            EngineFull: too many wait, too many images, or the service is about to end.
            RuntimeError: the service does not work, or does not answer.
        """
        placed = images if isinstance(images, list) else list(images)
        self.checks.check(prompt, params, placed)
        self._check_open()
        name = f"{self._life}-{next(self._count)}"
        stream = self._streams.enter(request_id, name, self.config.engine.max_waiting)
        output, finished = list[int](), False
        try:
            matcher = None
            if params.grammar is not None and self.grammars is not None:
                matcher = await asyncio.to_thread(self.grammars.compile, params.grammar)
            answer = Answer(request_id, len(prompt), params, self.tokenizer, matcher, self._eos)
            if placed:
                await asyncio.to_thread(_digest, placed)
            spec = self._spec(name, prompt, params, placed)
            placed.clear()
            if not self._streams.submit(stream, spec):
                yield answer.aborted()
                return
            while not finished:
                item = await stream.queue.get()
                if isinstance(item, Exception):
                    raise item
                self._learn(name, item, output)
                for event in answer.take(item):
                    finished = isinstance(event, Finished)
                    yield event
        finally:
            self._streams.leave(stream)
            self.shelf.release(name)
            if self.prefixes is not None:
                self.prefixes.end(name, output if finished else ())

    def abort(self, request_id: str) -> None:
        """Ask for a request to end; returns at once. Its reader gets `Finished`. Unknown ids are no error."""
        self._streams.abort(request_id)

    def stop_taking(self) -> None:
        """Refuse new requests from now on; those that are open go on."""
        self._taking = False

    def close(self, timeout: float = 10.0) -> None:
        """End all: readers get an error, workers are told to free what they hold. Takes `timeout` seconds at most.

        The post is to be closed after it. Idempotent.
        """
        if not self._closed:
            self._closed = True
            self._streams.end("the service stopped: shut down")
            self.loop.close(timeout)

    def _check_open(self) -> None:
        if self.failed is not None:
            raise RuntimeError(f"the service is not running: {self.failed}")
        if not self._taking:
            raise Draining("the service is shutting down; try again later", retry_after=5.0)

    def _spec(self, name: str, prompt: list[int], params: SamplingParams, placed: list[PlacedImage]) -> RequestSpec:
        """The request as the roles see it, its images on the shelf. Raises EngineFull."""
        images = self.shelf.put(name, [each.image for each in placed])
        sizes = [each.image.geometry for each in placed]
        places = tuple(
            Place(each.start, size.tokens, size.width, size.height, each.image.digest)
            for each, size in zip(placed, sizes, strict=True)
        )
        hit = 0
        if self.prefixes is not None:
            runs = [ImageRun(each.start, each.tokens, each.digest, each.width, each.height) for each in places]
            hit = self.prefixes.begin(name, prompt, params.cache_salt, runs)
        grammar = params.grammar
        most = min(params.max_tokens, self.context - len(prompt))
        return RequestSpec(
            tuple(prompt),
            most,
            # Drawn here, so that whoever goes on with the request draws what the one before would have drawn.
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            tenant=params.cache_salt,
            hit=hit,
            images=images,
            grammar="" if grammar is None else json.dumps([grammar.kind, grammar.after, grammar.text]),
            expected_output=min(most, _EXPECTED_OUTPUT),
            params=encode_params(params, places),
        )

    def _learn(self, name: str, item: Delivery, output: list[int]) -> None:
        if self.prefixes is None:
            return
        if isinstance(item, DeliverReady):
            self.prefixes.computed(name)
        elif isinstance(item, Deliver):
            output.extend(item.tokens)

    def _pixels(self, digest: str) -> bytes:
        image = self.shelf.get(digest)
        return b"" if image is None else pack(image)

    def _fail(self, why: str) -> None:
        self.failed = why
        self._streams.end(f"the service stopped: {why}")


def _digest(placed: list[PlacedImage]) -> None:
    """Have the images' digests made; each image keeps its own."""
    for each in placed:
        each.image.digest  # noqa: B018
