"""What a request's fields mean to the toy model: its tenant's salt, its images, where its answer ends."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b, sha256

from orchestrator.cache.chain import Chain, ChainScope, ImageRun
from orchestrator.simulate.store.store import LAYOUT
from orchestrator.simulate.toy import model


def embedding(digest: str) -> bytes:
    """The only right embedding of an image."""
    return blake2b(digest.encode(), digest_size=48).digest()


def salt_of(tenant: str, embeddings: Iterable[bytes] = ()) -> int:
    """The number that goes into every row: unlike for every tenant and for every list of images."""
    salt = zlib.crc32(tenant.encode())
    for payload in embeddings:
        salt = zlib.crc32(payload, salt)
    return salt


def root_of(tenant: str) -> bytes:
    """Root of a tenant's chains of keys."""
    return ChainScope(b"toy", LAYOUT, tenant=tenant.encode()).root()


def chain_of(tenant: str, images: Sequence[str]) -> Chain:
    """An empty chain for a sequence; its images stand before the first token, so every block depends on them."""
    runs = [ImageRun(n, 1, sha256(digest.encode()).digest(), 1, 1) for n, digest in enumerate(images)]
    return Chain(root_of(tenant), runs)


def ends_after(params: bytes) -> int | None:
    """Where the model ends an answer, as a workload writes it into `RequestSpec.params`."""
    return int(params) if params else None


def over(output: Sequence[int], most: int) -> str:
    """Why an answer has no more tokens; empty if it has."""
    if output and output[-1] == model.END:
        return "stop"
    return "length" if len(output) >= most else ""


def replayed(tokens: Sequence[int], length: int, prompt: int, *, seed: int, grammar: str, salt: int) -> model.Small:
    """The small state after the first `length` tokens, made anew from the last rows of the window and, for the
    grammar, from the first output token on. This is what a hit, a migration without state and a restart do."""
    start = max(0, length - model.WINDOW) & ~1  # a pair is not cut
    window = tokens[start:length]
    outputs = tokens[prompt:length]
    small = model.begin(seed, grammar)
    for token in outputs[: max(0, len(outputs) - len(window))]:
        small = model.advance(small, token)
    base = model.at_position(small, start)
    return model.absorb(base, model.rows(window, start, salt), window, min(len(outputs), len(window)))
