"""What a receiver lets in, by itself: the next part, whole, within its memory; the sender may say what it likes."""

from __future__ import annotations

import google_crc32c
import pytest

from orchestrator.transfer import Limits, LinkBroken, TransferFailed
from orchestrator.transfer.frames import Piece
from orchestrator.transfer.inbox import Inbox


def piece(number, data, name="a"):
    return Piece(number, name, google_crc32c.value(data)), data


@pytest.mark.parametrize(
    ("number", "name", "crc", "reason"),
    [
        (0, "a", 0, "message"),  # once more
        (2, "a", 0, "message"),  # one is missing
        (-1, "a", 0, "message"),
        (1, "é" * 128, 0, "size"),
        (1, "a", 1, "checksum"),
    ],
)
def test_another_part_than_the_next(number, name, crc, reason):
    inbox = Inbox(Limits())
    inbox.add(*piece(0, b"first"))
    with pytest.raises(LinkBroken) as error:
        inbox.add(Piece(number, name, google_crc32c.value(b"second") ^ crc), b"second")
    assert error.value.reason == reason and inbox.next == 1 and inbox.waiting == 5
    inbox.add(*piece(1, b"second"))
    assert [inbox.take(0), inbox.take(0)] == [("a", b"first"), ("a", b"second")]


def test_the_end():
    inbox = Inbox(Limits())
    inbox.add(*piece(0, b"x"))
    for count in (0, 2):
        with pytest.raises(LinkBroken, match=f"end: got {count} parts, 1 have come"):
            inbox.close(count)
    inbox.close(1)
    inbox.close(1)  # said again over another link
    with pytest.raises(LinkBroken, match="allowed is 1, the next"):
        inbox.add(*piece(1, b"y"))
    assert inbox.take(0) == ("a", b"x") and inbox.take(0) is None


def test_room():
    """One part of any allowed size when nothing waits, the rest of the window otherwise, never more than in all."""
    inbox = Inbox(Limits(part=100, window=60, total=200))
    assert inbox.room() == 100
    inbox.add(*piece(0, bytes(50)))
    assert inbox.room() == 10
    inbox.add(*piece(1, bytes(10)))
    assert inbox.room() == 0
    inbox.take(0)
    assert inbox.room() == 50
    inbox.take(0)
    inbox.add(*piece(2, bytes(100)))
    inbox.take(0)
    assert inbox.room() == 40


def test_what_came_is_given_before_a_failure_is_told_and_the_first_one_counts():
    inbox = Inbox(Limits())
    inbox.add(*piece(0, b""))
    inbox.fail(TransferFailed("lease", "first"))
    inbox.fail(TransferFailed("closed", "second"))
    assert inbox.take(0) == ("a", b"")
    with pytest.raises(TransferFailed, match="lease: first"):
        inbox.take(0)
