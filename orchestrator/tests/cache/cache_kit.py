"""Chains of small blocks for the cache's tests, and processes that die where they are told to."""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable

from orchestrator.cache.chain import ChainScope, block_keys, parents
from orchestrator.cache.retention import Retention
from orchestrator.cache.store.base import Block

LAYOUT = b"L" * 32
ROOT = ChainScope(model=b"m", layout=LAYOUT).root()


def payload(key: bytes, size: int = 256) -> bytes:
    """The only right bytes of a key."""
    return random.Random(key).randbytes(size)


def chain_keys(number: int, blocks: int, shared: int = 0) -> list[bytes]:
    """Keys of a chain; the first `shared` blocks are those of chain 0."""
    tokens = [(0 if block < shared else number) * 100_000 + block for block in range(blocks) for _ in range(128)]
    return block_keys(ROOT, tokens)


def chain(number: int, blocks: int, shared: int = 0, size: int = 256, **more: object) -> list[Block]:
    keys = chain_keys(number, blocks, shared)
    return [Block(key, parent, depth, payload(key, size), **more)
            for depth, (key, parent) in enumerate(zip(keys, parents(ROOT, keys), strict=True))]  # fmt: skip


def in_child(body: Callable[[Callable[[str], None]], None]) -> tuple[int, list[str]]:
    """Run `body(say)` in a forked process. Returns its status (negative: the signal that ended it) and what it said."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(read)
            body(lambda line: os.write(write, f"{line}\n".encode()) and None)
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as said:
        lines = said.read().splitlines()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), lines


class KillAt:
    """An `At` that ends the process at the n-th point it reaches; 0 only counts."""

    def __init__(self, number: int = 0) -> None:
        self.number, self.reached = number, 0
        self.names: list[str] = []

    def __call__(self, name: str) -> None:
        self.reached += 1
        self.names.append(name)
        if self.reached == self.number:
            os.kill(os.getpid(), signal.SIGKILL)


AGENT, CHAT = Retention.AGENT, Retention.CHAT
