import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cache.chain import Chain, ChainScope, ImageRun, block_keys, framed, usable_blocks

SCOPE = ChainScope(model=b"m" * 32, layout=b"l" * 32, numerics=b"rope", tenant=b"a")
TOKENS = list(range(1000, 1000 + 128 * 4 + 7))
IMAGE = ImageRun(start=100, tokens=60, digest=b"p" * 32, width=640, height=480)


def test_first_key_follows_its_definition() -> None:
    root = SCOPE.root()
    message = struct.pack("<I", 32) + root + struct.pack("<I", 128) + np.arange(128, dtype="<u4").tobytes()
    assert block_keys(root, range(128)) == [hashlib.sha256(message + struct.pack("<I", 0)).digest()]


@pytest.mark.parametrize("field", ["model", "layout", "numerics", "tenant", "adapter"])
def test_every_part_of_the_scope_separates(field: str) -> None:
    other = replace(SCOPE, **{field: b"x" * 32})
    assert not set(block_keys(SCOPE.root(), TOKENS)) & set(block_keys(other.root(), TOKENS))


def test_fields_cannot_run_into_each_other() -> None:
    assert ChainScope(b"ab", b"c").root() != ChainScope(b"a", b"bc").root()
    assert framed(b"ab", b"") != framed(b"a", b"b")


@given(st.integers(0, 511), st.integers(1, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_changed_token_changes_its_block_and_all_after(position: int, change: int) -> None:
    base = block_keys(SCOPE.root(), TOKENS)
    other = list(TOKENS)
    other[position] = (other[position] + change) % 2**32
    keys = block_keys(SCOPE.root(), other)
    same = [a == b for a, b in zip(base, keys, strict=True)]
    assert same == [block < position // 128 for block in range(4)]


@given(st.lists(st.integers(0, 200), max_size=12))
@settings(max_examples=60, deadline=None)
def test_pieces_give_the_keys_of_the_whole(pieces: list[int]) -> None:
    tokens = list(range(sum(pieces)))
    chain, at = Chain(SCOPE.root()), 0
    for piece in pieces:
        chain.extend(tokens[at : at + piece])
        at += piece
    assert chain.keys == block_keys(SCOPE.root(), tokens)
    assert chain.tokens == len(tokens)


def test_a_fork_goes_on_from_its_block() -> None:
    chain = Chain(SCOPE.root(), [IMAGE])
    chain.extend(TOKENS)
    fork = chain.fork(2)
    fork.extend(TOKENS[256:])
    assert fork.keys == chain.keys
    with pytest.raises(ValueError, match=r"blocks: got 5, allowed are 0 to 4"):
        chain.fork(5)


def test_images_with_equal_placeholders_are_told_apart() -> None:
    plain = block_keys(SCOPE.root(), TOKENS)
    shown = block_keys(SCOPE.root(), TOKENS, [IMAGE])
    assert plain[0] != shown[0]
    for change in ({"digest": b"q" * 32}, {"width": 641}, {"height": 481}, {"start": 101}, {"tokens": 61}):
        other = block_keys(SCOPE.root(), TOKENS, [replace(IMAGE, **change)])
        assert other[0] != shown[0]
    only_second = [ImageRun(130, 10, b"p" * 32, 640, 480)]
    assert block_keys(SCOPE.root(), TOKENS, only_second)[0] == plain[0]
    assert block_keys(SCOPE.root(), TOKENS, only_second)[1] != plain[1]


def test_a_whole_prompt_is_never_a_hit() -> None:
    assert [usable_blocks(n) for n in (0, 1, 128, 129, 256, 257)] == [0, 0, 0, 1, 1, 2]


def test_lists_and_arrays_give_the_same_keys() -> None:
    arrays = [np.array(TOKENS, dtype) for dtype in ("<u4", ">u4", "<i8", "<u8")]
    assert all(block_keys(SCOPE.root(), a) == block_keys(SCOPE.root(), TOKENS) for a in arrays)


@pytest.mark.parametrize(
    "bad",
    [[-1], [2**32], [[1, 2]], [0.5], ["a"], np.array([-1]), np.array([2**32]), np.zeros((2, 2), int), np.zeros(2)],
)
def test_bad_tokens_are_named(bad: list) -> None:
    with pytest.raises(ValueError, match=r"^tokens: got .*, allowed"):
        Chain(SCOPE.root()).extend(bad)
