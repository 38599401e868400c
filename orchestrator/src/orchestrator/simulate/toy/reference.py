"""What the answer has to be: the toy model on plain lists, without blocks, batches, transfers or faults."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.simulate.toy import model


class Reference:
    """The one right answer of a request, made as far as somebody asked for it.

    Args:
        most: tokens of the answer. stop_after: the answer ends by END behind so many tokens; None for no END before
        `most`.
    """

    def __init__(
        self, prompt: Sequence[int], *, seed: int, salt: int, grammar: str, most: int, stop_after: int | None = None
    ) -> None:
        if not prompt:
            raise ValueError("prompt: got no token, allowed are 1 or more")
        self.prompt, self.most, self.stop_after = tuple(prompt), most, stop_after
        self.tokens: list[int] = []
        self._salt = salt
        self._rows = model.rows(prompt, 0, salt)
        self._small = model.absorb(model.begin(seed, grammar), self._rows, prompt, 0)

    @property
    def length(self) -> int:
        """Tokens of the whole answer, END among them."""
        return self.most if self.stop_after is None else min(self.most, self.stop_after + 1)

    def token(self, index: int) -> int:
        """The answer's token `index`, from 0 on. Raises IndexError behind its end."""
        if not 0 <= index < self.length:
            raise IndexError(f"index: got {index}, allowed are 0 to {self.length - 1}")
        while len(self.tokens) <= index:
            if len(self.tokens) == self.stop_after:
                self.tokens.append(model.END)
                break
            token = model.next_token(self._rows, self._small)
            self.tokens.append(token)
            row = model.rows((token,), self._small.length, self._salt, self._small.tail)
            self._rows += row
            self._small = model.absorb(self._small, row, (token,), 1)
        return self.tokens[index]
