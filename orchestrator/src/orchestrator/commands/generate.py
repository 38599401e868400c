"""`fathom generate`: continue one text."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.commands.device import check_device
from orchestrator.commands.errors import UsageError
from orchestrator.commands.paths import cache_folder, find_model
from orchestrator.commands.speculation import speculation_of
from orchestrator.commands.threads import use_threads

if TYPE_CHECKING:
    from orchestrator.engine.request import GrammarSpec, SamplingParams
    from orchestrator.engine.stats import EngineStats


@dataclass(frozen=True)
class GenerateOptions:
    """The options of the command, as given."""

    prompt: str
    model: str | None = None
    max_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    image: tuple[Path, ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    lark: str | None = None
    device: str = "cpu"
    reproducible: bool = True
    threads: int | None = None
    stats: bool = False
    speculation: str = "scheduled"
    ep: int = 1
    ep_slots: int | None = None
    ep_plan: str = "off"
    ep_domain: int = 0


def generate(options: GenerateOptions) -> int:
    """Print the continuation as it comes; returns the exit status."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt:
        raise UsageError("The prompt is empty; give some text, or - to read it from standard input")
    use_threads(options.threads)
    check_device(options.device)
    speculation = speculation_of(options.speculation)
    _params(options, {})  # refuses bad values before a model is looked for
    folder = find_model(options.model)
    from orchestrator.text.sampling import sampling_defaults

    params = _params(options, sampling_defaults(folder))
    if options.ep == 1 and (options.ep_slots or options.ep_plan != "off" or options.ep_domain):
        raise UsageError("--ep-slots, --ep-plan and --ep-domain say how several processes share experts; give --ep too")
    if options.ep > 1 and options.image:
        raise UsageError("--image: got files and --ep, allowed is one of them")
    if options.ep > 1:
        from orchestrator.commands.expert_parallel import generate_parallel

        return generate_parallel(options, folder, prompt, params, speculation)
    from orchestrator.engine.curve_cache import use_curve
    from orchestrator.engine.llm import LLM
    from orchestrator.engine.request import Finished, Ready, TokenOutput
    from orchestrator.vision import ImagePrompt

    llm = LLM(
        folder,
        max_num_seqs=1,
        dense="fixed" if options.reproducible else "library",
        device=options.device,
        speculation=speculation,
    )
    use_curve(llm.engine, cache_folder() / "curves")
    began, first, tokens, ready = time.perf_counter(), 0.0, 0, None
    try:
        for event in llm.stream(ImagePrompt([*options.image, prompt]) if options.image else prompt, params):
            if isinstance(event, Ready):
                ready = event
            elif isinstance(event, TokenOutput):
                first = first or time.perf_counter()
                tokens += 1
                _write(event.text)
            elif isinstance(event, Finished):
                _write(event.text + ("\n" if sys.stdout.isatty() else ""))
                if event.reason == "error":
                    raise UsageError(f"Generation failed: {event.error}", code=1)
    except BrokenPipeError:  # the reader, for instance `head`, has enough
        sys.stderr.close()
        return 0
    if options.stats:
        _print_stats(ready.prompt_tokens if ready else 0, tokens, began, first, llm.engine.stats)
    return 0


def _params(options: GenerateOptions, defaults: dict[str, Any]) -> SamplingParams:
    from orchestrator.engine.request import SamplingParams

    given = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
    try:
        return SamplingParams(
            max_tokens=options.max_tokens,
            **(defaults | {name: value for name, value in given.items() if value is not None}),
            seed=options.seed,
            stop=options.stop,
            grammar=_grammar(options),
        )
    except ValueError as error:
        raise UsageError(f"--{str(error).replace('_', '-', 1)}") from None


def _grammar(options: GenerateOptions) -> GrammarSpec | None:
    from orchestrator.engine.request import GrammarSpec

    given = {"json_schema": options.json_schema, "regex": options.regex, "lark": options.lark}
    chosen = {kind: text for kind, text in given.items() if text is not None}
    if len(chosen) > 1:
        raise UsageError(f"Give one of {', '.join('--' + kind.replace('_', '-') for kind in chosen)}, not several")
    for kind, text in chosen.items():
        if kind != "regex" and not text.lstrip().startswith("{") and "\n" not in text and _is_file(text):
            text = Path(text).read_text(encoding="utf-8")
        return GrammarSpec(kind, text)  # type: ignore[arg-type]
    return None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # too long for a name
        return False


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _print_stats(prompt: int, tokens: int, began: float, first: float, engine: EngineStats) -> None:
    ended = time.perf_counter()
    parts = [f"{prompt} prompt tokens", f"{tokens} new tokens"]
    if first:
        parts.append(f"first token after {first - began:.3f} s")
    if tokens > 1:
        parts.append(f"{(tokens - 1) / (ended - first):.1f} tokens/s after that")
    if engine.drafts:
        parts.append(f"{engine.accepted} of {engine.drafts} drafts accepted in {engine.verifications} steps")
    print(f"\n{', '.join(parts)}", file=sys.stderr)
