"""What the front knows of the store that all workers share: beginnings of prompts that went through it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from kernel_core.check import require
from orchestrator.cache.chain import Chain, ImageRun, framed, usable_blocks
from orchestrator.model.config import BLOCK_TOKENS


class KnownPrefixes:
    """An estimate, by which the router plans: workers store what they compute, and a block may be gone by now.

    Blocks are named by chains of hashes as in the store, but without its scope, since one service has one. The least
    recently used go beyond `most`. For one thread.
    """

    def __init__(self, most: int = 1 << 20) -> None:
        require(most >= 1, "most", most, "1 or more")
        self._most = most
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._open: dict[str, Chain] = {}

    def begin(self, request: str, prompt: Sequence[int], salt: str = "", images: Sequence[ImageRun] = ()) -> int:
        """Tokens of a prompt that the store has by what is known: whole blocks, fewer than all."""
        chain = Chain(hashlib.sha256(framed(b"front", salt.encode())).digest(), images)
        chain.extend(prompt)
        self._open[request] = chain
        hit = 0
        for key in chain.keys[: usable_blocks(len(prompt))]:
            if key not in self._known:
                break
            self._known.move_to_end(key)
            hit += 1
        return hit * BLOCK_TOKENS

    def computed(self, request: str) -> None:
        """Its first token has come: a worker has all of its prompt, and stores it."""
        chain = self._open.get(request)
        if chain is not None:
            self._note(chain.keys)

    def end(self, request: str, output: Sequence[int] = ()) -> None:
        """A request is over; with its output, if it came to its end, which a next turn will begin with."""
        chain = self._open.pop(request, None)
        if chain is not None and output:
            self._note(chain.extend(output[:-1]))  # the last token has no rows

    def _note(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
