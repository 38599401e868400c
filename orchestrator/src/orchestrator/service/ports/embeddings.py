"""Embeddings of a prompt's images that an encoder elsewhere made: from bytes to what an engine holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from orchestrator.cache.chain import ImageRun
from orchestrator.engine.engine import Engine
from orchestrator.engine.image_spans import ImageSpan
from orchestrator.service.spec import Carried, Place


def adopt_embeddings(
    engine: Engine, prompt: Sequence[int], carried: Carried, embeddings: Mapping[str, bytes]
) -> tuple[ImageSpan, ...]:
    """The spans of a request's images, held by the engine until `Engine.release`.

    Args:
        embeddings: bfloat16 [tokens, hidden] as bytes, by the digest of the pixels in hex.

    Raises:
        ValueError: places that are none, or embeddings that are missing or of another size. Nothing is held.
        EngineFull: other requests' images take the room.
    """
    if not carried.places:
        return ()
    if engine.images is None:
        raise ValueError(f"images: got {len(carried.places)}, allowed is none, since the model reads no images")
    width, mark, behind = engine.model.config.hidden_size, engine.model.config.image_token_id, 0
    runs, rows = [], []
    for number, place in enumerate(carried.places):
        end = place.start + place.tokens
        if place.start < behind or end > len(prompt) or set(prompt[place.start : end]) != {mark}:
            raise ValueError(f"images[{number}]: got positions {place.start} to {end}, which are not an image's")
        behind = end
        runs.append(ImageRun(place.start, place.tokens, place.digest, place.width, place.height))
        rows.append(_rows(number, place, embeddings.get(place.digest.hex(), b""), width))
    return engine.images.adopt(runs, rows, carried.params.cache_salt)


def _rows(number: int, place: Place, data: bytes, width: int) -> torch.Tensor:
    """bfloat16 [tokens, width]."""
    wanted = place.tokens * width * torch.bfloat16.itemsize
    if len(data) != wanted:
        raise ValueError(f"images[{number}]: got an embedding of {len(data)} bytes, allowed are {wanted}")
    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(place.tokens, width)
