"""What a request carries that no core looks at: sampling parameters, and where its images stand in its prompt."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from orchestrator.engine.request import SamplingParams
from orchestrator.roles.messages import RequestSpec

_DIGEST_BYTES = 32


class Place(Struct, frozen=True):
    """An image's run of placeholders in the prompt, as `cache.chain.ImageRun`; `digest` is SHA-256 of its pixels."""

    start: int
    tokens: int
    width: int
    height: int
    digest: bytes

    def __post_init__(self) -> None:
        if self.start < 0 or min(self.tokens, self.width, self.height) < 1 or len(self.digest) != _DIGEST_BYTES:
            raise ValueError(f"place: got {self}, allowed are sizes of 1 or more and a digest of {_DIGEST_BYTES} bytes")


class Carried(Struct, frozen=True):
    """What `RequestSpec.params` carries, as msgpack."""

    params: SamplingParams
    places: tuple[Place, ...] = ()


def encode_params(params: SamplingParams, places: tuple[Place, ...] = ()) -> bytes:
    return msgspec.msgpack.encode(Carried(params, places))


def decode_params(spec: RequestSpec) -> SamplingParams:
    """Raises ValueError for bytes that are none."""
    return decode_carried(spec).params


def decode_carried(spec: RequestSpec) -> Carried:
    """Raises ValueError for bytes that are none, and for places of other images than the request's."""
    try:
        carried = msgspec.msgpack.decode(spec.params, type=Carried)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"params: {error}") from None
    placed, named = {place.digest.hex() for place in carried.places}, {image.digest for image in spec.images}
    if placed != named:
        raise ValueError(f"params: places of {len(placed)} images, allowed are those of the request's {len(named)}")
    return carried
