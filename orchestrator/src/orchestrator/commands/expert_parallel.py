"""`fathom generate --ep N`: one text, with the experts spread over N processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.commands.generate import GenerateOptions
    from orchestrator.engine.request import SamplingParams


def generate_parallel(
    options: GenerateOptions, folder: Path, prompt: str, params: SamplingParams, speculation: str | int
) -> int:
    """Print the continuation as it comes; returns the exit status."""
    from orchestrator.cluster.options import PLANS
    from orchestrator.cluster.start import EpLLM
    from orchestrator.engine.request import Finished, TokenOutput

    if options.ep_plan not in PLANS:
        raise UsageError(f"--ep-plan: got {options.ep_plan!r}, allowed are {', '.join(PLANS)}")
    eplb, statistics = PLANS[options.ep_plan]
    try:
        llm = EpLLM(
            folder,
            ranks=options.ep,
            slots=options.ep_slots,
            eplb=eplb,
            statistics=statistics,
            domain=options.ep_domain,
            threads=options.threads or 1,
            max_num_seqs=1,
            device=options.device,
            dense="fixed" if options.reproducible else "library",
            speculation=speculation,
        )
    except ValueError as error:
        raise UsageError(f"--ep {options.ep} cannot be used: {error}") from None
    with llm:
        began, first, tokens = time.perf_counter(), 0.0, 0
        for event in llm.stream(prompt, params):
            if isinstance(event, TokenOutput):
                first = first or time.perf_counter()
                tokens += 1
            if isinstance(event, TokenOutput | Finished) and event.text:
                sys.stdout.write(event.text)
                sys.stdout.flush()
            if isinstance(event, Finished) and event.reason == "error":
                raise UsageError(f"Generation failed: {event.error}", code=1)
        if sys.stdout.isatty():
            sys.stdout.write("\n")
        if options.stats and tokens > 1:
            speed = (tokens - 1) / (time.perf_counter() - first)
            text = f"{tokens} new tokens, first token after {first - began:.3f} s, {speed:.1f} tokens/s after that"
            read = max(llm.engine.bytes_read.values()) / 2**20
            sys.stderr.write(f"\n{text}, {options.ep} ranks, {read:.1f} MiB of the checkpoint read by each\n")
    return 0
