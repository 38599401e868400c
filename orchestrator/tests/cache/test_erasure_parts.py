import random
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from orchestrator.cache.block_object import WrongBytes
from orchestrator.cache.erasure import code, shard
from orchestrator.cache.erasure.placement import place, ranked, replacement
from orchestrator.cache.erasure.read import Ask, Bad, Came, Done, Down, Fail, Start, StripeRead, Tick
from orchestrator.cache.erasure.shard import Stripe

STRIPE = Stripe(5, 9, b"L" * 32, b"p" * 32, 64, 300, tuple(bytes([n]) * 32 for n in range(7)))


@pytest.mark.parametrize("size", [1, 160, 161, 2100, 9_000])
def test_any_two_of_twelve_may_be_gone(size: int) -> None:
    data = random.Random(size).randbytes(size)
    shards = dict(enumerate(code.encode(data)))
    assert {len(body) for body in shards.values()} == {code.shard_size(size)}
    for lost in combinations(range(12), 2):
        left = {n: body for n, body in shards.items() if n not in lost}
        assert code.decode(left, size) == data
        assert code.rebuild(left, lost, size) == {n: shards[n] for n in lost}
    with pytest.raises(ValueError, match="shards: got"):
        code.decode({n: shards[n] for n in range(9)}, size)


def test_parity_is_p_and_q_of_raid_6() -> None:
    data = np.random.default_rng(1).integers(0, 256, (10, 320), dtype=np.uint8)
    shards = code.encode(data.tobytes())
    q = np.zeros(320, np.uint16)
    for row in data[::-1]:
        q = q << 1
        q = np.where(q & 0x100, q ^ 0x11D, q) ^ row
    assert shards[10] == np.bitwise_xor.reduce(data, 0).tobytes()
    assert shards[11] == q.astype(np.uint8).tobytes()


def test_production_shards_are_whole_pages() -> None:
    assert code.shard_size(32 * 113_920) == 364_544 == 89 * 4096
    assert shard.HEADER_BYTES == 4096


def test_every_flipped_bit_of_a_shard_is_found() -> None:
    body = code.encode(random.Random(3).randbytes(STRIPE.size))[4]
    data = shard.seal(STRIPE, 4, body)
    assert shard.verify(data, STRIPE, 4) == body
    assert shard.open_shard(data) == (STRIPE, 4, body)
    rng = random.Random(4)
    for bit in [*range(0, 900 * 8, 3), *(rng.randrange(len(data) * 8) for _ in range(300))]:
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WrongBytes):
            shard.verify(bytes(wrong), STRIPE, 4)
    for end in (0, 100, 4096, len(data) - 1):
        with pytest.raises(WrongBytes):
            shard.verify(data[:end], STRIPE, 4)


@pytest.mark.parametrize(
    "change", [{"number": 6}, {"generation": 8}, {"layout": b"M" * 32}, {"depth": 0}, {"keys": STRIPE.keys[:6]}]
)
def test_a_shard_of_another_stripe_is_no_answer(change: dict) -> None:
    fields = {name: getattr(STRIPE, name) for name in STRIPE.__dataclass_fields__}
    data = shard.seal(Stripe(**{**fields, **change}), 4, b"x" * 16)
    with pytest.raises(WrongBytes):
        shard.verify(data, STRIPE, 4)
    with pytest.raises(WrongBytes, match="key"):
        shard.verify(shard.seal(STRIPE, 3, b"x" * 16), STRIPE, 4)


def test_names_round_trip() -> None:
    assert shard.parse_name(shard.name(0xABC, 7)) == (0xABC, 7)
    assert all(shard.parse_name(text) is None for text in ("x", "1-2", "zz-00", ""))


def test_placement_spreads_and_stays() -> None:
    many = {f"t{n}": f"rack{n // 2}" for n in range(24)}
    load: Counter[str] = Counter()
    for stripe in range(600):
        chosen = place(stripe, many)
        assert len({many[target] for target in chosen}) == 12
        load.update(chosen)
        fewer = {name: domain for name, domain in many.items() if name != "t3"}
        assert [t for t in ranked(stripe, many) if t != "t3"] == ranked(stripe, fewer)
    assert max(load.values()) < 1.4 * 600 * 12 / 24
    pairs = {f"t{n}": f"rack{n // 2}" for n in range(12)}
    assert set(place(1, pairs)) == set(pairs)


@pytest.mark.parametrize("bad", [{f"t{n}": f"t{n}" for n in range(11)}, {f"t{n}": f"rack{n // 3}" for n in range(12)}])
def test_placement_that_one_failure_could_end_is_refused(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"targets: got 1[12] in \d+ failure domains, allowed"):
        place(0, bad)


def test_a_replacement_keeps_domains_apart() -> None:
    names = {f"t{n}": f"t{n}" for n in range(14)}
    held = place(3, names)
    new = replacement(3, held, held[0], {n: d for n, d in names.items() if n != held[0]})
    assert new is not None and new not in held
    assert replacement(3, held, held[0], {n: n for n in held[1:]}) is None


def test_a_read_asks_eleven_and_takes_the_first_ten() -> None:
    core = StripeRead((), hedge_s=1.0)
    (ask,) = core.step(Start(), 0.0)
    assert ask == Ask(tuple(range(11)))
    for n in range(1, 10):
        assert core.step(Came(n), 0.1) == []
    assert core.step(Came(10), 0.1) == [Done()] and core.step(Came(0), 0.2) == []


def test_the_twelfth_is_asked_at_once_when_one_is_dead_or_wrong_and_at_the_hedge() -> None:
    assert StripeRead({3}, 1.0).step(Start(), 0.0) == [Ask((0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11))]
    for event in (Bad(2), Down(2)):
        core = StripeRead((), 1.0)
        core.step(Start(), 0.0)
        assert core.step(event, 0.1) == [Ask((11,))] and core.hedge_at is None
    core = StripeRead((), 1.0)
    core.step(Start(), 0.0)
    assert core.step(Tick(), 0.9) == [] and core.step(Tick(), 1.0) == [Ask((11,))]


@pytest.mark.parametrize("seed", range(40))
def test_a_read_ends_with_ten_if_and_only_if_ten_are_to_be_had(seed: int) -> None:
    rng = random.Random(seed)
    fate = {n: rng.choices([Came, Bad, Down], [8, 1, 1])[0] for n in range(12)}
    dead = {n for n in range(12) if fate[n] is Down and rng.random() < 0.5}
    absent = {n for n in range(12) if fate[n] is Bad and rng.random() < 0.5}
    core = StripeRead(dead | absent, 1.0, ask=rng.choice([10, 11, 12]))
    waiting: list[int] = []
    asked: set[int] = set()
    outcome, now, actions = None, 0.0, core.step(Start(), 0.0)
    while True:
        for action in actions:
            if isinstance(action, Ask):
                assert not set(action.shards) & asked
                asked.update(action.shards)
                waiting += action.shards
            else:
                outcome = action
        if outcome is not None or not waiting:
            break
        now += rng.random() / 4
        if rng.random() < 0.2:
            actions = core.step(Tick(), now)
        else:
            n = waiting.pop(rng.randrange(len(waiting)))
            actions = core.step(fate[n](n), now)
    good = sum(f is Came for f in fate.values())
    assert isinstance(outcome, Done) == (good >= 10)
    if good < 10:
        assert isinstance(outcome, Fail) and outcome.lost <= (sum(f is Bad for f in fate.values()) > 2)
