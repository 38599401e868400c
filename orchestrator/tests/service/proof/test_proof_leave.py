"""Clients that go away at every event, and clients that have only just connected."""

from __future__ import annotations

import pytest
from proof_kit import Load, some

from bench.service.clients import complaints


@pytest.mark.parametrize("kind", ["sampled", "image", "schema"])
def test_nothing_is_held_for_clients_that_left(reference, park, kind):
    """After 0, 1, 2, ... events."""
    wanted = some(51, 12, kinds=(kind,), tokens=40)
    events = {ask.name: number for number, ask in enumerate(wanted)}
    expected = reference.answers(wanted)
    with Load(park, wanted, at_once=12, leave=lambda ask: events[ask.name]) as load:
        pass
    assert complaints(expected, load.got) == {}
    assert any(answer.left for answer in load.got.values())
    park.wait_idle(30)
    assert park.status()["entry"]["live"] == 0
