"""Expert-parallel engines of one host, as processes, and a batch interface to them like `LLM`'s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from orchestrator.cluster.local_ep import LocalExpertParallel
from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.process import FromFolder
from orchestrator.cluster.workers import ProcessWorkers
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.llm import Prompt, RequestOutput, apply_event
from orchestrator.engine.request import Event, SamplingParams
from orchestrator.model.checkpoint.reader import Checkpoint

_OWN = {f.name for f in fields(EpOptions)} - {"ranks", "engine"}


def start_processes(folder: str | Path, options: EpOptions, wrap: Any = None) -> LocalExpertParallel:
    """Start a process a rank and wait until they serve. `wrap` is what a test puts around each one's data link."""
    model = Checkpoint(folder).config
    options = options.resolved(model)
    workers = ProcessWorkers(options.ranks, options, model, FromFolder(str(folder)), wrap)
    return LocalExpertParallel(workers, options, model)


class EpLLM:
    """A model over several processes of this host, each with a share of the experts.

    Args:
        model: folder of a checkpoint. ranks: processes.
        options: fields of `EpOptions` (slots, spares, eplb, statistics, domain, timeout, combine, ...), else of
            `EngineConfig`.

    Example:
        >>> with EpLLM("models/v41-mini", ranks=2) as llm:
        >>>     llm.generate(["def f(x):"], SamplingParams(max_tokens=8, seed=1))[0].text
    """

    def __init__(self, model: str | Path, ranks: int, **options: Any) -> None:
        from orchestrator.text.tokenizer import load_tokenizer

        own = {name: options.pop(name) for name in _OWN if name in options}
        self.tokenizer = load_tokenizer(model)
        settings = EpOptions(ranks, engine=EngineConfig(**options), **own)
        self.engine = start_processes(model, settings)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt; results come in the order of the prompts. `params` is one for all or one a prompt.

        Raises ValueError, before anything runs, for a prompt that is neither text nor token ids.
        """
        settings = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(settings) != len(prompts):
            raise ValueError(f"params: got {len(settings)}, allowed is one, or one for each of {len(prompts)} prompts")
        ids = [self._encode(prompt) for prompt in prompts]
        results = {}
        for prompt, setting in zip(ids, settings, strict=True):
            results[self.engine.submit(prompt, setting)] = RequestOutput(prompt)
        for event in self.engine.events():
            if event.request_id in results:
                apply_event(results[event.request_id], event)
        return list(results.values())

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        """Events of one request as they happen."""
        mine = self.engine.submit(self._encode(prompt), params or SamplingParams())
        for event in self.engine.events():
            if event.request_id == mine:
                yield event

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> EpLLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list):
            raise ValueError(f"prompt: got {type(prompt).__name__}, allowed are text and token ids over several ranks")
        return list(prompt)
