import random

import pytest

from orchestrator.cache.block_object import HEADER_BYTES, WrongBytes, parse, seal, verify

LAYOUT, KEY, PARENT = b"l" * 32, b"k" * 32, b"p" * 32
PAYLOAD = random.Random(1).randbytes(1000)


def stored() -> bytes:
    return seal(LAYOUT, KEY, PARENT, 3, 7, PAYLOAD) + PAYLOAD


def test_what_is_written_is_read() -> None:
    assert verify(stored() + b"more", LAYOUT, KEY, 7) == PAYLOAD
    header = parse(stored())
    assert (header.key, header.parent, header.depth, header.generation, header.size) == (KEY, PARENT, 3, 7, 1000)


def test_every_flipped_bit_is_found() -> None:
    data, random_ = stored(), random.Random(2)
    places = [*range(HEADER_BYTES * 8), *(random_.randrange(len(data) * 8) for _ in range(400))]
    for bit in places:
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WrongBytes):
            verify(torn, LAYOUT, KEY, 7)


def test_every_cut_and_every_torn_end_is_found() -> None:
    data = stored()
    for end in [0, 1, HEADER_BYTES - 1, HEADER_BYTES, *range(HEADER_BYTES + 1, len(data), 97)]:
        for torn in (data[:end], data[:end].ljust(len(data), b"\0")):
            with pytest.raises(WrongBytes):
                verify(torn, LAYOUT, KEY, 7)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [((b"x" * 32, KEY, 7), "layout"), ((LAYOUT, b"x" * 32, 7), "key"), ((LAYOUT, KEY, 8), "generation")],
)
def test_another_block_is_no_answer(asked: tuple, reason: str) -> None:
    with pytest.raises(WrongBytes, match=reason):
        verify(stored(), *asked)
