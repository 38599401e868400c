"""Recorded workloads as chains of block keys.

The traces hold no text, only which blocks of a request were seen before. Tokens are made up so that equal blocks, and
only those, have equal tokens; keys then come from the real chain.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchestrator.cache.chain import Chain
from orchestrator.cache.retention import Retention

_ROOT = bytes(32)
_AGENTIC_BLOCK = 64
_MOONCAKE_BLOCK = 512


@dataclass(frozen=True)
class TraceRequest:
    """One request: when it came, its prompt's tokens, and the keys of its full blocks."""

    time: float
    tokens: int
    keys: list[bytes]
    retention: Retention
    depth: int
    """1 and more for requests of sub-agents."""


def agentic(path: Path, spread_s: float = 86_400.0, seed: int = 0) -> list[TraceRequest]:
    """Sessions of coding agents (`sessions_compact_unique.jsonl.gz`), by time.

    A line has one session; a request [time, tokens in, tokens out, blocks, blocks shared with an earlier request, ...]
    with blocks of 64 tokens. Which earlier request it shares with is not recorded: the latest that is long enough is
    taken. Sessions start at random within `spread_s` seconds, since the trace gives times from a session's start only.
    """
    rng = random.Random(seed)
    found: list[TraceRequest] = []
    made = _Made()
    for line in _lines(path):
        session = json.loads(line)
        if session["block"] != _AGENTIC_BLOCK:
            raise ValueError(f"block: got {session['block']}, allowed is {_AGENTIC_BLOCK}")
        start = rng.uniform(0, spread_s)
        earlier: list[tuple[int, np.ndarray, Chain]] = []
        for request in session["req"]:
            time, tokens, blocks, shared = request[0], request[1], request[3], request[4]
            chain, ids = Chain(_ROOT), np.empty(0, np.uint32)
            for length, their_ids, theirs in reversed(earlier):
                if length >= shared:
                    ids = their_ids[:shared]
                    chain = theirs.fork(shared * _AGENTIC_BLOCK // 128)
                    break
            ids = np.concatenate([ids, made.ids(blocks - shared)])
            chain.extend(made.tokens(ids, _AGENTIC_BLOCK)[len(chain.keys) * 128 :])
            earlier.append((blocks, ids, chain))
            found.append(TraceRequest(start + time, tokens, chain.keys, Retention.AGENT, request[7]))
    return sorted(found, key=lambda request: request.time)


def mooncake(path: Path, start_s: float = 0.0) -> list[TraceRequest]:
    """Chat requests of Mooncake (`*_trace.jsonl`): ids of 512-token blocks that hold across all requests.

    The last, partial block of a prompt has an id as well; only full blocks of 128 tokens of it are counted.
    """
    found = []
    for line in _lines(path):
        request = json.loads(line)
        tokens = request["input_length"]
        ids = np.array(request["hash_ids"], np.uint32)
        chain = Chain(bytes(31) + b"\1")
        chain.extend(_Made.tokens(ids, _MOONCAKE_BLOCK)[:tokens])
        found.append(TraceRequest(start_s + request["timestamp"] / 1e3, tokens, chain.keys, Retention.CHAT, 0))
    return sorted(found, key=lambda request: request.time)


class _Made:
    """Made-up tokens: those of a block are its id and their numbers."""

    def __init__(self) -> None:
        self._next = 1

    def ids(self, count: int) -> np.ndarray:
        """Ids that no block has had."""
        first, self._next = self._next, self._next + count
        return np.arange(first, first + count, dtype=np.uint32)

    @staticmethod
    def tokens(ids: np.ndarray, size: int) -> np.ndarray:
        return np.repeat(ids, size)


def _lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise ValueError(f"path: got {path}, allowed is a trace file; docs/kv_cache.md says which")
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from file
