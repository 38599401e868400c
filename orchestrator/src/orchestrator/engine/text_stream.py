"""Tokens to text, one at a time: nothing half-finished leaves, nothing is lost, stop strings never show.

Two things are held back: the first bytes of a character whose rest has not come, and text that may be the start of
a stop string. Bytes that are not UTF-8 become U+FFFD as in Python's ``decode(errors="replace")``, so the pieces
joined equal decoding all bytes at once, wherever the token borders fall.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What became certain with one token. `stopped` is the stop string that ended the text, if one did."""

    text: str
    stopped: str | None = None


class TextStream:
    """Incremental decoder of one request.

    Args:
        tokenizer: gives the bytes of each id; control tokens give none.
        stop: strings that end the text. The one that is complete first wins; of those complete at the same
            character, the longest. Its text and all that follows are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop: got {stop!r}, allowed is a sequence of strings, none of them empty")
        self._tokenizer = tokenizer
        self._stop = tuple(sorted(set(stop), key=len, reverse=True))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stopped

    @property
    def pending(self) -> tuple[str, bytes]:
        """What waits for more: text that may begin a stop string, and the first bytes of a character."""
        return self._held, self._decoder.getstate()[0]

    def push(self, token_id: int, *, may_stop: bool = True) -> TextDelta:
        """Take one sampled id; without `may_stop` its text is let through unsearched.

        After a stop string, returns nothing more. Raises ValueError for an unknown id.
        """
        data = self._tokenizer.token_bytes(token_id)
        if self._tokenizer.is_control(token_id) or self._stopped is not None:
            return TextDelta("", self._stopped)
        text = self._decoder.decode(data)
        return self._take(text) if may_stop else TextDelta(text)

    def finish(self) -> str:
        """The text still held back, at the end of generation. An unfinished character becomes U+FFFD."""
        if self._stopped is not None:
            return ""
        rest = self._take(self._decoder.decode(b"", final=True))
        tail, self._held = self._held, ""
        return rest.text if self._stopped is not None else rest.text + tail

    def _take(self, text: str) -> TextDelta:
        if not self._stop:
            return TextDelta(text)
        held = self._held + text
        found = self._first_stop(held, searched=len(self._held))
        if found is not None:
            begin, self._stopped = found
            self._held = ""
            return TextDelta(held[:begin], self._stopped)
        keep = self._possible_start(held)
        self._held = held[len(held) - keep :]
        return TextDelta(held[: len(held) - keep])

    def _first_stop(self, text: str, searched: int) -> tuple[int, str] | None:
        """Begin and string of the stop that is complete first; none is complete within the first `searched`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            begin = text.find(stop, max(0, searched - len(stop) + 1))
            if begin >= 0 and (best is None or begin + len(stop) < best[0]):
                best = (begin + len(stop), begin, stop)
        return best and (best[1], best[2])

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stop) - 1)
        for size in range(longest, 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0
