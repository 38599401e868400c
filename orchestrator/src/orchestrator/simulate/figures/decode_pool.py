"""Decode: ranks that step together. Requests are placed between two steps, by the rules of `balance.decode`."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kernel_core.check import require
from orchestrator.balance.decode import DecodeEngine, Incoming, need, place
from orchestrator.balance.decode.placement import Choose
from orchestrator.simulate.figures.published import DecodeCost


@dataclass
class DecodePool:
    """Attributes:
    ranks: of the group. room: tokens of cache of each. expected: output tokens to plan with.
    alike: steps take what they would if every rank held the mean, a bound for any placement.
    """

    ranks: int
    cost: DecodeCost
    choose: Choose
    room: int
    expected: float
    alike: bool = False
    turn: int = 0
    queue: deque[Incoming] = field(default_factory=deque)
    _leaving: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(self.ranks > 0, "ranks", self.ranks, "1 or more")
        self.engines = [DecodeEngine(f"{i:04}", room=self.room) for i in range(self.ranks)]
        self.sequences = np.zeros(self.ranks)
        self.tokens = np.zeros(self.ranks)
        self._outputs: dict[str, int] = {}

    def put(self, number: int, length: int, output: int) -> None:
        """A request whose prompt is here; it is placed before the next step."""
        self.queue.append(Incoming(str(number), length, need(length, self.expected)))
        self._outputs[str(number)] = output

    def begin(self) -> tuple[float, float, list[int]] | None:
        """Start a step: its seconds, those of ranks that are all alike, and requests new in it. None if idle."""
        fresh = self._place() if self.queue else []
        if not self.sequences.any():
            require(not self.queue, "room", self.room, "enough for the longest request")
            return None
        alike = self.cost.step(float(self.sequences.mean()), float(self.tokens.mean()))
        seconds = alike if self.alike else self.cost.step(float(self.sequences.max()), float(self.tokens.max()))
        return seconds, alike, fresh

    def finish(self) -> list[tuple[int, int]]:
        """End the step: requests that are done, with the tokens that they gave out."""
        self.turn += 1
        self.tokens += self.cost.accepted * self.sequences
        done = []
        while self._leaving and self._leaving[0][0] <= self.turn:
            _, number, rank, held, kept = heapq.heappop(self._leaving)
            output = self._outputs.pop(str(number))
            steps = max(1, math.ceil(output / self.cost.accepted))
            self.sequences[rank] -= 1
            self.tokens[rank] -= held + self.cost.accepted * steps
            engine = self.engines[rank]
            engine.requests -= 1
            engine.room += kept
            done.append((number, output))
        return done

    def _place(self) -> list[int]:
        for engine, held in zip(self.engines, self.tokens.tolist(), strict=True):
            engine.tokens = round(held)
        placed = place(self.engines, list(self.queue), self.choose)
        for incoming, engine in placed:
            rank, number = int(engine.name), int(incoming.request)
            self.sequences[rank] += 1
            self.tokens[rank] += incoming.length
            steps = max(1, math.ceil(self._outputs[incoming.request] / self.cost.accepted))
            heapq.heappush(self._leaving, (self.turn + steps, number, rank, incoming.length, incoming.need))
            self.queue.popleft()
        return [int(incoming.request) for incoming, _ in placed]
