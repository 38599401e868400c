"""Keys of cache blocks: a hash chain over full blocks of tokens and everything else that their rows depend on.

Every field is framed by its length, so no two different inputs give the same message. The chain is strict: a key stands
for all tokens from the first to the end of its block, for the model, the layout, the tenant and the images.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.model.config import BLOCK_TOKENS

KEY_BYTES = 32
_DOMAIN = b"fathom-kv/1"
_PARENT_FRAME = struct.pack("<I", KEY_BYTES)
_COUNT = struct.pack("<I", BLOCK_TOKENS)
_NO_IMAGES = struct.pack("<I", 0)

Tokens = Sequence[int] | npt.NDArray[np.integer]


def framed(*fields: bytes) -> bytes:
    """Each field behind its length in four little-endian bytes."""
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)


@dataclass(frozen=True)
class ChainScope:
    """What makes equal tokens mean equal rows. Two requests share blocks only if all of it is equal.

    Attributes:
        model: digest of the weights.
        layout: `BlockLayout.tag`.
        numerics: digest or words for what else changes rows: RoPE and Engram settings, formats, replay mode.
        tenant: salt of the tenant; requests of different salts never share.
        adapter: name of a fine-tuned adapter, empty for none.
    """

    model: bytes
    layout: bytes
    numerics: bytes = b""
    tenant: bytes = b""
    adapter: bytes = b""

    def root(self) -> bytes:
        """The key that stands before the first block."""
        size = struct.pack("<I", BLOCK_TOKENS)
        fields = framed(_DOMAIN, self.model, self.layout, self.numerics, size, self.tenant, self.adapter)
        return hashlib.sha256(fields).digest()


@dataclass(frozen=True)
class ImageRun:
    """An image's run of placeholder tokens: ids alone do not tell two images apart.

    Attributes:
        start: position of the first placeholder in the prompt.
        tokens: how many placeholders.
        digest: SHA-256 of the preprocessed pixels.
        width, height: size in pixels that the positions were made from.
    """

    start: int
    tokens: int
    digest: bytes
    width: int
    height: int

    def __post_init__(self) -> None:
        if len(self.digest) != 32:
            raise ValueError(f"digest: got {len(self.digest)} bytes, allowed are the 32 of SHA-256")
        if self.start < 0 or self.tokens < 1:
            raise ValueError(f"start, tokens: got {self.start}, {self.tokens}, allowed are at least 0 and 1")

    def within(self, block: int) -> bytes | None:
        """The image as a framed field of this block, None where the run does not touch it."""
        begin = block * BLOCK_TOKENS
        if self.start + self.tokens <= begin or self.start >= begin + BLOCK_TOKENS:
            return None
        place = struct.pack("<qqII", self.start - begin, self.tokens, self.width, self.height)
        return framed(place, self.digest)


def usable_blocks(tokens: int) -> int:
    """Blocks of a prompt that a hit may cover: at least one token is left to compute, for its logits."""
    return max(0, tokens - 1) // BLOCK_TOKENS


class Chain:
    """The keys of one growing sequence.

    `extend` takes tokens as they come (a prompt at once, then decoded ones) and returns the keys of the blocks that
    became full. `fork` starts another sequence from the same first blocks without hashing them again.
    """

    def __init__(self, root: bytes, images: Sequence[ImageRun] = ()) -> None:
        if len(root) != KEY_BYTES:
            raise ValueError(f"root: got {len(root)} bytes, allowed are {KEY_BYTES} (`ChainScope.root`)")
        self.root = root
        self.images = tuple(images)
        self.keys: list[bytes] = []
        self._open = b""

    @property
    def tokens(self) -> int:
        """Tokens taken so far."""
        return len(self.keys) * BLOCK_TOKENS + len(self._open) // 4

    def extend(self, tokens: Tokens) -> list[bytes]:
        """Keys of the blocks that these tokens fill. Raises ValueError for ids outside 0 .. 2^32 - 1."""
        data = self._open + _packed(tokens)
        step = 4 * BLOCK_TOKENS
        full = len(data) // step
        parent = self.keys[-1] if self.keys else self.root
        sha256, first, made = hashlib.sha256, len(self.keys), []
        for number in range(full):
            extras = self._extras(first + number) if self.images else _NO_IMAGES
            piece = data[number * step : (number + 1) * step]
            parent = sha256(_PARENT_FRAME + parent + _COUNT + piece + extras).digest()
            made.append(parent)
        self.keys += made
        self._open = data[full * step :]
        return made

    def fork(self, blocks: int) -> Chain:
        """A new sequence that begins with the first `blocks` blocks of this one."""
        if not 0 <= blocks <= len(self.keys):
            raise ValueError(f"blocks: got {blocks}, allowed are 0 to {len(self.keys)}")
        end = blocks * BLOCK_TOKENS
        other = Chain(self.root, [image for image in self.images if image.start < end])
        other.keys = self.keys[:blocks]
        return other

    def _extras(self, block: int) -> bytes:
        found = [field for image in self.images if (field := image.within(block)) is not None]
        return struct.pack("<I", len(found)) + framed(*found)


def block_keys(root: bytes, tokens: Tokens, images: Sequence[ImageRun] = ()) -> list[bytes]:
    """Keys of all full blocks of a prompt."""
    return Chain(root, images).extend(tokens)


def parents(root: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """The parent of each key of a whole chain."""
    return [root, *keys[:-1]] if keys else []


def _packed(tokens: Tokens) -> bytes:
    """Four little-endian bytes a token."""
    if not isinstance(tokens, np.ndarray):
        try:  # three times as fast as NumPy for a list
            packed = array("I", tokens)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"tokens: got {error}, allowed are whole numbers from 0 to {(1 << 32) - 1}") from error
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens: got {tokens.ndim} dimensions of {tokens.dtype}, allowed is one of whole numbers")
    if tokens.size and tokens.dtype != np.dtype("<u4"):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= 1 << 32:
            raise ValueError(f"tokens: got {low if low < 0 else high}, allowed are 0 to {(1 << 32) - 1}")
    return tokens.astype("<u4", copy=False).tobytes()
