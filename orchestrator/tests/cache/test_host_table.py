import random
from pathlib import Path

import pytest
from cache_kit import LAYOUT, ROOT, payload

from orchestrator.cache.block_object import WrongBytes
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.host.table import HostTable


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_conserved_and_never_shared(seed: int) -> None:
    rng, table = random.Random(seed), HostTable(12)
    filling: dict[int, int] = {}
    pins: list[list[int]] = []
    for _ in range(400):
        what = rng.random()
        if what < 0.4:
            given = table.give()
            if given is None:
                assert len(filling) + len({s for p in pins for s in p}) == 12
            else:
                slot, generation = given
                assert slot not in filling and all(slot not in p for p in pins)
                filling[slot] = generation
        elif what < 0.7 and filling:
            slot = rng.choice(list(filling))
            generation = filling.pop(slot)
            if rng.random() < 0.8:
                key = bytes([rng.randrange(20)])
                assert table.find(key) in (None, table.fill(slot, generation, key))
            else:
                table.abandon(slot, generation)
        elif what < 0.85:
            found = [s for k in range(20) if (s := table.find(bytes([k]))) is not None]
            path = rng.sample(found, min(len(found), 3))
            for slot in path:
                table.pin(slot)
            pins.append(path)
        elif pins:
            table.unpin(pins.pop())
        assert sum(table.counts.values()) == 12
        assert table.counts["filling"] == len(filling)
    for path in pins:
        table.unpin(path)
    assert table.pinned == 0


def test_a_late_writer_cannot_touch_a_slot_that_was_given_on() -> None:
    table = HostTable(1)
    given = table.give()
    assert given is not None
    table.abandon(*given)
    second = table.give()
    assert second is not None and second[1] != given[1]
    with pytest.raises(ValueError, match="is not being filled under generation"):
        table.fill(*given, b"k")


def test_the_last_of_a_path_goes_first() -> None:
    table = HostTable(3)
    path = []
    for key in (b"a", b"b", b"c"):
        given = table.give()
        assert given is not None
        path.append(table.fill(*given, key))
    for slot in path:
        table.pin(slot)
    table.unpin(path)
    table.give()
    assert [table.find(k) is not None for k in (b"a", b"b", b"c")] == [True, True, False]


def test_arena_round_trip_and_survey(tmp_path: Path) -> None:
    arena = HostArena.create(tmp_path / "arena", LAYOUT, 4, 256)
    keys = [bytes([n]) * 32 for n in range(3)]
    for slot, key in enumerate(keys):
        arena.write(slot, key, ROOT, slot, 10 + slot, payload(key))
    other = HostArena.attach(tmp_path / "arena")
    assert other.read(1, keys[1], 11) == payload(keys[1]) == bytes(other.payload(1))
    other.payload(2)[7] ^= 1
    with pytest.raises(WrongBytes, match="checksum"):
        arena.read(2, keys[2], 12)
    for key, generation in ((keys[0], 11), (keys[1], 10)):
        with pytest.raises(WrongBytes):
            arena.read(0, key, generation)
    again = HostArena.create(tmp_path / "arena", LAYOUT, 4, 256)
    assert [(slot, h.key, h.generation) for slot, h in again.survey()] == [(0, keys[0], 10), (1, keys[1], 11)]
    again.erase(0)
    assert not arena.holds(0, keys[0], 10) and arena.holds(1, keys[1], 11)


def test_an_arena_of_another_size_is_replaced_under_its_users(tmp_path: Path) -> None:
    first = HostArena.create(tmp_path / "arena", LAYOUT, 2, 256)
    first.write(0, b"k" * 32, ROOT, 0, 1, payload(b"k" * 32))
    second = HostArena.create(tmp_path / "arena", LAYOUT, 3, 256)
    assert list(second.survey()) == []
    assert first.read(0, b"k" * 32, 1) == payload(b"k" * 32)
    (tmp_path / "other").write_bytes(b"no arena" * 20)
    with pytest.raises(ValueError, match="allowed is a host arena"):
        HostArena.attach(tmp_path / "other")
