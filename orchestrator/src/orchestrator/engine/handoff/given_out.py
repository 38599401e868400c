"""What is known of a request outside of its engine: the tokens that were given out. Enough to go on elsewhere.

After a crash nothing else is left. The tokens are computed again as one reads a prompt; text, grammar and minimum
lengths are rebuilt from them, and draws depend on seed and position alone, so what follows is what would have followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.engine.request import FinishReason, SamplingParams
from orchestrator.engine.sequence import Sequence


@dataclass
class GivenOut:
    """A request and its output so far, as whoever passes tokens on to a client knows them.

    Attributes:
        ready: `Ready` was passed on.
        tokens: output tokens passed on, in order; token i is passed on once, whoever computed it.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    ready: bool = False
    tokens: list[int] = field(default_factory=list)

    def note(self, index: int, token: int) -> bool:
        """Take output token number `index`; False, with nothing changed, unless it is the next one."""
        if index != len(self.tokens):
            return False
        self.tokens.append(token)
        return True


def repeat_tokens(sequence: Sequence, tokens: Iterable[int]) -> None:
    """Append tokens that another engine gave out, and rebuild what follows from them: text, stops, grammar.

    Raises ValueError for tokens that could not have been given out: behind the request's end, or against its grammar.
    """
    for number, token in enumerate(tokens):
        if ended_by(sequence)[0] is not None:
            raise ValueError(f"generated: got more than {number} tokens, allowed are {number}, which end the request")
        sequence.announced = True
        sequence.tokens.append(token)
        if sequence.text is not None:
            sequence.text.push(token, may_stop=sequence.output_len >= sequence.params.min_tokens)
        if sequence.matcher is not None:
            sequence.matcher.consume(token)


def ended_by(sequence: Sequence) -> tuple[FinishReason | None, str | None]:
    """Why a request's output ends with its last token (reason, stop string), or (None, None).

    An end token is not among those that are given out. The order is that in which the engine looks.
    """
    if sequence.text is not None and sequence.text.stopped is not None:
        return "stop", sequence.text.stopped
    if sequence.matcher is not None and sequence.output_len and sequence.matcher.stopped:
        return "stop", None
    if len(sequence.tokens) >= sequence.max_total:
        return "length", None
    return None, None
