"""All sections of an evaluation, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.evaluate.acceptance import Acceptance, measure_acceptance
from orchestrator.evaluate.bits import SCORED, Logits, Tick, model_bits, replay_bits
from orchestrator.evaluate.calibration import calibrate
from orchestrator.evaluate.every_row import reading_every_row
from orchestrator.evaluate.needle import MakePrompt, measure_needles
from orchestrator.evaluate.prompts import QUESTIONS, code_prompts, conversation_prompts
from orchestrator.evaluate.recall import measure_recall
from orchestrator.evaluate.results import Results, checkpoint_digest
from orchestrator.evaluate.sizes import SECTIONS, SIZES, Sizes
from orchestrator.evaluate.text import HeldOut
from orchestrator.model.drafter import Drafter
from orchestrator.model.transformer import Transformer

Progress = Callable[[str, int], Tick]
"""Told of a section that begins and of the tokens it will take; gives what to tell of tokens done."""


class Evaluation:
    """A model with what it is measured on.

    `reference` gives the logits of another implementation, `needles` makes retrieval prompts; sections that need one
    that is missing are left out and noted.
    """

    def __init__(
        self,
        folder: Path,
        model: Transformer,
        heldout: HeldOut,
        size: str,
        *,
        reference: Logits | None = None,
        needles: MakePrompt | None = None,
        notes: Collection[str] = (),
        progress: Progress = lambda name, total: lambda tokens: None,
        seed: int = 0,
    ) -> None:
        self.model, self.heldout, self.reference, self.needles = model, heldout, reference, needles
        longest = max(len(stream) for _, stream in heldout.streams)
        self.sizes: Sizes = SIZES[size].within(model.config, longest)
        self.drafter = Drafter(model) if model.weights.drafter is not None else None
        self.progress, self.seed = progress, seed
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.results = Results(folder.name, checkpoint_digest(folder), date, size, notes=list(notes))

    def run(self, sections: Collection[str] = SECTIONS) -> Results:
        """Run the named sections. Raises ValueError for a name that is none."""
        for name in sections:
            if name not in SECTIONS:
                raise ValueError(f"only: got {name!r}, allowed are {', '.join(SECTIONS)}")
        if {"acceptance", "calibration"} & set(sections):
            self._timed("acceptance", lambda: self._speculation(sections))
        for name, section in (
            ("bits", self._bits),
            ("replay", self._replay),
            ("recall", self._recall),
            ("needle", self._needle),
        ):
            if name in sections:
                self._timed(name, section)
        return self.results

    def _timed(self, name: str, section: Callable[[], None]) -> None:
        began = time.perf_counter()
        section()
        self.results.seconds[name] = round(time.perf_counter() - began, 1)

    def _bits(self) -> None:
        windows = self.heldout.windows(self.sizes.bits, self.sizes.window)
        passes = 3.5 + (self.reference is not None)
        tick = self.progress("bits", int(passes * len(windows) * self.sizes.window))
        if self.reference is None:
            self.results.notes.append("There was no reference implementation to compare with.")
        self.results.bits = model_bits(self.model, windows, reference=self.reference, tick=tick)

    def _replay(self) -> None:
        replayed = 2 * (SCORED + self.model.config.sliding_window)
        total = sum(n * (3 * (h + SCORED) // 2 + replayed) for h, n in self.sizes.replay.items())
        tick = self.progress("replay", total)
        for hit, count in self.sizes.replay.items():
            windows = self.heldout.windows(count, hit + SCORED)
            self.results.replay[hit] = replay_bits(self.model, windows, hit, tick)

    def _speculation(self, sections: Collection[str]) -> None:
        if self.drafter is None:
            self.results.notes.append("The model has no draft stages.")
            return
        sizes, tokenizer = self.sizes, self.heldout.tokenizer
        prompts = code_prompts(self.heldout, sizes.prompts, sizes.prompt_tokens)
        prompts += conversation_prompts(tokenizer, QUESTIONS[: sizes.questions])
        temperatures = (0.0, 1.0) if "acceptance" in sections else (1.0,)
        prefill = sum(len(p.tokens) for p in prompts)
        # Nothing accepted is the most it can take.
        total = len(temperatures) * (prefill + len(prompts) * sizes.output * self.model.config.backtracking)
        tick = self.progress("acceptance", total)
        found: list[Acceptance] = []
        for temperature in temperatures:
            found += measure_acceptance(
                self.model, self.drafter, prompts, temperature, sizes.output,
                seed=self.seed, eos=tokenizer.eos_ids, tick=tick,
            )  # fmt: skip
        if "acceptance" in sections:
            self.results.acceptance = found
        if "calibration" in sections:
            self.results.calibration = calibrate(found[-1].trials)

    def _recall(self) -> None:
        tick = self.progress("recall", sum(c * n for c, n in self.sizes.recall.items()))
        for context, count in self.sizes.recall.items():
            texts = [window.tokens for window in self.heldout.windows(count, context)]
            self.results.recall += measure_recall(self.model, texts, context, tick)

    def _needle(self) -> None:
        if self.needles is None:
            self.results.notes.append("There was nothing to make retrieval prompts with.")
            return
        depths, sizes = self.sizes.depths, self.sizes.needle
        wide = {tokens: trials for tokens, trials in sizes.items() if tokens <= self.sizes.every_row}
        work = [(self.model, False, sizes), (reading_every_row(self.model, max(wide, default=0) + 64), True, wide)]
        total = sum(tokens * trials * len(depths) for _, _, each in work for tokens, trials in each.items())
        tick = self.progress("needle", total)
        for model, every_row, each in work:
            for tokens, trials in each.items():
                for depth in depths:
                    needle = measure_needles(
                        model, self.heldout.tokenizer, self.needles, tokens, depth, trials, seed=self.seed, tick=tick
                    )
                    self.results.needle.append(replace(needle, every_row=every_row))
