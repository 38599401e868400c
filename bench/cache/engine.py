"""Time to the first token of a long prompt, cold and after hits of several kinds, through the real engine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.discover import ROOT
from orchestrator.commands.prefix import stored_prefixes
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.model.load import load_model
from orchestrator.text.tokenizer import Tokenizer, load_tokenizer

HOT_RUNS = 5
_PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@dataclass(frozen=True)
class FirstToken:
    """Seconds to the first token of one kind of request, and its cached tokens; of hits the median of `HOT_RUNS`."""

    way: str
    seconds: float
    cached: int


def measure(folder: Path, tokens: int) -> Iterator[FirstToken]:
    """Cold and hot in each mode, windows kept or not, and from a store by an engine that has never seen the prompt."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    prompt = long_prompt(tokenizer, tokens)

    def engine(mode: str, window_bytes: int) -> Engine:
        blocks = tokens // BLOCK_TOKENS + 16
        made = Engine(model, tokenizer, EngineConfig(num_blocks=blocks, max_num_seqs=2, prefix_cache=mode,  # type: ignore[arg-type]
                                                     window_bytes=window_bytes))  # fmt: skip
        first_token(made, prompt[:600][::-1])  # nothing of the prompt, but everything once
        return made

    for mode, window_bytes in (("exact", 1 << 28), ("bounded", 0), ("canonical", 1 << 28)):
        kept = "windows kept" if window_bytes else "windows rebuilt"
        one = engine(mode, window_bytes)
        yield FirstToken(f"{mode}, cold", *first_token(one, prompt))
        yield _median(f"{mode}, {kept}", [first_token(one, prompt) for _ in range(HOT_RUNS)])
    for mode in ("bounded", "canonical"):
        with tempfile.TemporaryDirectory() as store:
            found = []
            for _ in range(1 + HOT_RUNS):  # the first one stores
                one = engine(mode, 0)
                with stored_prefixes(one, Path(store), 1.0, folder):
                    found.append(first_token(one, prompt))
            yield _median(f"{mode}, from the store", found[1:])


def long_prompt(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """The project's own pages, again and again. Raises ValueError where there are none."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError(f"docs: got no pages in {ROOT / 'docs'}, allowed is at least one to make a prompt of")
    return (ids * (tokens // len(ids) + 1))[:tokens]


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds from the request to its first token, and its cached tokens. Runs it to its end."""
    began, seconds, cached = time.perf_counter(), 0.0, 0
    engine.add("one", prompt, _PARAMS)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                seconds = seconds or time.perf_counter() - began
            elif isinstance(event, Finished):
                cached = event.cached_tokens
    return seconds, cached


def _median(way: str, found: list[tuple[float, int]]) -> FirstToken:
    return FirstToken(way, median(seconds for seconds, _ in found), min(cached for _, cached in found))
