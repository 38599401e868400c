"""What speculative decoding gains: tokens a verification step, and acceptance place by place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.evaluate.prompts import Prompt
from orchestrator.evaluate.speculate import Trial, speculate
from orchestrator.evaluate.statistics import Estimate, ratio_of_sums
from orchestrator.model.drafter import Drafter
from orchestrator.model.transformer import Transformer

BATCH = 8


@dataclass(frozen=True)
class Acceptance:
    """Figures of one kind of prompt at one temperature.

    Attributes:
        length: tokens committed in a verification step, the target's own one included; its error by bootstrap over
            prompts.
        rates: chance that draft k is kept where those before it were, and its error; the number of such cases.
        trials: every verification, `Trial.request` counted over all prompts of the kind.
    """

    kind: str
    temperature: float
    prompts: int
    steps: int
    length: Estimate
    rates: tuple[Estimate, ...]
    cases: tuple[int, ...]
    trials: tuple[Trial, ...]


def measure_acceptance(
    model: Transformer,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    temperature: float,
    max_tokens: int,
    *,
    seed: int = 0,
    eos: Sequence[int] = (),
    tick: Callable[[int], None] = lambda _: None,
) -> list[Acceptance]:
    """One entry for each kind among the prompts, in order of appearance, then one over all if there are several."""
    trials: dict[str, list[Trial]] = {}
    for kind in dict.fromkeys(p.kind for p in prompts):
        own = [p for p in prompts if p.kind == kind]
        trials[kind] = []
        for first in range(0, len(own), BATCH):
            batch = [p.tokens for p in own[first : first + BATCH]]
            decoded = speculate(
                model, drafter, batch, max_tokens, temperature=temperature, seed=seed + first, eos=eos, tick=tick
            )
            trials[kind] += [_moved(t, first) for t in decoded.trials]
    results = [summarise(kind, temperature, found) for kind, found in trials.items()]
    if len(trials) > 1:
        shifted, offset = [], 0
        for found in trials.values():
            shifted += [_moved(t, offset) for t in found]
            offset += 1 + max(t.request for t in found)
        results.append(summarise("all", temperature, shifted))
    return results


def summarise(kind: str, temperature: float, trials: Sequence[Trial]) -> Acceptance:
    """Figures of a list of verifications. Raises ValueError for an empty one."""
    if not trials:
        raise ValueError("trials: got none, allowed is at least one")
    requests = sorted({t.request for t in trials})
    by_request = [[t for t in trials if t.request == r] for r in requests]
    length = ratio_of_sums(
        [sum(t.kept + _own(t) for t in group) for group in by_request], [len(group) for group in by_request]
    )
    places = max(t.offered for t in trials)
    rates, cases = [], []
    for k in range(places):
        tried = [sum(t.kept >= k and t.offered > k for t in group) for group in by_request]
        stood = [sum(t.kept > k for t in group) for group in by_request]
        if sum(tried) == 0:
            break
        rates.append(ratio_of_sums(stood, tried))
        cases.append(sum(tried))
    return Acceptance(kind, temperature, len(requests), len(trials), length, tuple(rates), tuple(cases), tuple(trials))


def _own(trial: Trial) -> int:
    """The target's own token of a step; there is none behind an accepted end token."""
    return 0 if trial.ended else 1


def _moved(trial: Trial, offset: int) -> Trial:
    return Trial(**{**vars(trial), "request": trial.request + offset})
