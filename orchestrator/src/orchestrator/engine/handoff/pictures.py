"""Images of a prompt that travels: their places, names and embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestrator.cache.chain import ImageRun
from orchestrator.engine.handoff.messages import Offer, Picture
from orchestrator.engine.handoff.parts import HandoffRefused
from orchestrator.engine.image_spans import ImageSpan
from orchestrator.engine.request import EngineFull
from orchestrator.model.config import ModelConfig

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine


def image_bytes(rows: torch.Tensor) -> bytes:
    """Embeddings bfloat16 [tokens, d] as bytes."""
    return rows.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def picture_bytes(picture: Picture, config: ModelConfig) -> int:
    """Bytes of an image's embeddings."""
    return picture.tokens * config.hidden_size * torch.bfloat16.itemsize


def check_pictures(engine: Engine, offer: Offer) -> None:
    """Raise HandoffRefused for images that overlap or lie outside of the prompt, or an engine that takes none."""
    if offer.pictures and engine.images is None:
        raise HandoffRefused("model", f"pictures: got {len(offer.pictures)}, allowed is none without an image encoder")
    behind = 0
    for number, picture in enumerate(offer.pictures):
        end = picture.start + picture.tokens
        if picture.start < behind or picture.tokens < 1 or end > offer.prompt_len or len(picture.digest) != 32:
            got = f"positions {picture.start} to {end}"
            allowed = f"some from {behind} to {offer.prompt_len} and a digest of 32 bytes"
            raise HandoffRefused("state", f"pictures[{number}]: got {got}, allowed are {allowed}")
        behind = end


def adopt_pictures(engine: Engine, offer: Offer, prompt: list[int], images: list[bytes]) -> tuple[ImageSpan, ...]:
    """Have the engine hold the images of a request. Raises HandoffRefused, with none held."""
    if not offer.pictures:
        return ()
    assert engine.images is not None
    config, runs, rows = engine.model.config, [], []
    for picture, data in zip(offer.pictures, images, strict=True):
        place = slice(picture.start, picture.start + picture.tokens)
        if set(prompt[place]) != {config.image_token_id}:
            raise HandoffRefused("state", f"pictures: positions {place.start} to {place.stop} are not an image's")
        try:
            runs.append(ImageRun(picture.start, picture.tokens, picture.digest, picture.width, picture.height))
        except ValueError as error:
            raise HandoffRefused("state", f"pictures: {error}") from None
        rows.append(torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(picture.tokens, config.hidden_size))
    try:
        return engine.images.adopt(runs, rows, offer.params.cache_salt)
    except EngineFull as error:
        raise HandoffRefused("room", str(error)) from None
    except ValueError as error:
        raise HandoffRefused("state", str(error)) from None
