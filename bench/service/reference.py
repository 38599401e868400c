"""What every client should get: answers of one undisturbed process, a request at a time where asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.service.answers import Answer
from bench.service.asks import Ask
from bench.service.clients import run_crowd
from bench.service.park import Park, ParkError, Shape


class Reference:
    """Started with the first question; the same question is answered from memory."""

    def __init__(self, folder: Path, *, model: str | None = None, options: tuple[str, ...] = ()) -> None:
        self._folder, self._model, self._options = folder, model, options
        self._park: Park | None = None
        self._known: dict[str, Answer] = {}

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        if self._park is not None:
            self._park.stop()

    @property
    def park(self) -> Park:
        if self._park is None:
            self._park = Park(Shape(), self._folder, model=self._model, options=self._options)
            self._park.wait_serving()
        return self._park

    def answers(
        self, some: Sequence[Ask], *, at_once: int = 8, step: Callable[[], None] = lambda: None
    ) -> dict[str, Answer]:
        """By name. Raises ParkError when one of them could not be had."""
        new = [ask for ask in some if repr(ask.body) not in self._known]
        for _ in range(len(some) - len(new)):
            step()
        for name, answer in run_crowd(self.park.url, new, at_once=at_once, done=lambda ask, answer: step()).items():
            if answer.trouble:
                raise ParkError(f"the undisturbed service failed at {name}: {answer.trouble}")
            self._known[next(repr(ask.body) for ask in new if ask.name == name)] = answer
        return {ask.name: self._known[repr(ask.body)] for ask in some}
