"""The client with the I/O done in the same process: what it promises, without processes."""

from pathlib import Path

import pytest
from cache_kit import CHAT, LAYOUT, chain_keys, payload

from orchestrator.cache.chain import ChainScope
from orchestrator.cache.client import CacheClient, Plan
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import Put
from orchestrator.cache.store.embedded import EmbeddedStore

SCOPE = ChainScope(model=b"m", layout=LAYOUT)


@pytest.fixture
def store(tmp_path: Path) -> EmbeddedStore:
    policy = RetentionPolicy(ttl={Retention.AGENT: 1e9, Retention.CHAT: 2e9})
    return EmbeddedStore(tmp_path / "store", LAYOUT, 1 << 20, policy)


def client_of(store: EmbeddedStore, tmp_path: Path, slots: int = 8) -> CacheClient:
    return CacheClient.inline(store, HostArena.create(tmp_path / f"arena{slots}", LAYOUT, slots, 256), SCOPE)


def tokens(number: int, blocks: int, tail: int = 1) -> list[int]:
    return [number * 100_000 + block for block in range(blocks) for _ in range(128)] + [7] * tail


def insert(client: CacheClient, plan: Plan, first: int = 0, **more: object) -> list[Put]:
    keys = plan.chain.keys[first:]
    handle = client.insert(plan.chain, first, [payload(key) for key in keys], **more)
    assert handle.done
    return handle.puts


def test_a_prompt_is_found_again_up_to_its_last_token(store, tmp_path) -> None:
    client = client_of(store, tmp_path, 16)
    plan = client.match(tokens(1, 4))
    assert plan.blocks == 0 and plan.chain.keys == chain_keys(1, 4)
    assert insert(client, plan) == [Put.STORED] * 4
    assert [client.match(tokens(1, 4, tail)).hit_tokens for tail in (1, 0)] == [512, 384]
    assert client.match(tokens(1, 3) + tokens(2, 2)).blocks == 3
    fetch = client.fetch(client.match(tokens(1, 4)), 1.0)
    assert fetch.done and [fetch.payload(n) for n in range(4)] == [payload(k) for k in plan.chain.keys]
    assert fetch.intact() == 4
    fetch.release()
    assert client.numbers()["pinned"] == 0


def test_another_tenants_tokens_are_not_found(store, tmp_path) -> None:
    client = client_of(store, tmp_path, 16)
    insert(client, client.match(tokens(1, 2)))
    other = ChainScope(model=b"m", layout=LAYOUT, tenant=b"other").root()
    assert client.match(tokens(1, 2), root=other).blocks == 0


def test_a_fetch_larger_than_the_host_tier_brings_the_first_blocks(store, tmp_path) -> None:
    big, small = client_of(store, tmp_path, 32), client_of(store, tmp_path, 3)
    insert(big, big.match(tokens(1, 6)))
    fetch = small.fetch(small.match(tokens(1, 6)), 1.0)
    assert fetch.blocks == 3
    second = small.fetch(small.match(tokens(1, 6)), 1.0, first=3)
    assert second.done and second.blocks == 0  # all slots are pinned: refused, not waited for
    fetch.release()
    second = small.fetch(small.match(tokens(1, 6)), 1.0, first=3)
    assert [second.payload(n) for n in range(second.blocks)] == [payload(k) for k in chain_keys(1, 6)[3:]]


def test_a_block_that_went_bad_cuts_the_hit(store, tmp_path) -> None:
    big = client_of(store, tmp_path, 32)
    insert(big, big.match(tokens(1, 5)))
    cold = client_of(store, tmp_path, 9)
    plan = cold.match(tokens(1, 5))
    entry = store.index.get(plan.chain.keys[2])
    assert plan.blocks == 5 and entry is not None
    path = store.segments.folder / f"segment-{entry.place.segment:010d}.blocks"
    data = bytearray(path.read_bytes())
    data[entry.place.offset + 200] ^= 1
    path.write_bytes(data)
    fetch = cold.fetch(plan, 1.0)
    assert [fetch.payload(n) for n in range(fetch.blocks)] == [payload(k) for k in chain_keys(1, 5)[:2]]
    fetch.release()
    assert cold.match(tokens(1, 5)).blocks == 2
    assert cold.numbers()["pinned"] == 0


def test_decode_extends_the_chain_and_concurrent_inserts_meet(store, tmp_path) -> None:
    one, two = client_of(store, tmp_path, 16), client_of(store, tmp_path, 17)
    plan, same = one.match(tokens(1, 2, 100)), two.match(tokens(1, 2, 100))
    assert insert(one, plan) == [Put.STORED] * 2 and insert(two, same) == [Put.ALREADY] * 2
    new = plan.chain.extend(list(range(40)))
    assert len(new) == 1 and insert(one, plan, 2) == [Put.STORED]
    assert two.match([*tokens(1, 2, 100), *range(40)]).blocks == 3


def test_a_use_prolongs_and_a_probe_does_not(store, tmp_path) -> None:
    client = client_of(store, tmp_path, 16)
    plan = client.match(tokens(1, 3))
    insert(client, plan)
    entry = store.index.get(plan.chain.keys[1])
    assert entry is not None
    before = (entry.atime, entry.expiry)
    client.match(tokens(1, 3))
    client.fetch(client.match(tokens(1, 3)), 1.0).release()
    assert (entry.atime, entry.expiry) == before
    client.use(plan, 2, CHAT)
    assert entry.atime > before[0] and entry.expiry > before[1] + 9e8


def test_pins_hold_a_path_in_the_store(store, tmp_path) -> None:
    client = client_of(store, tmp_path, 16)
    plan = client.match(tokens(1, 3))
    assert client.pin(plan.chain.keys, 1e12) is None
    insert(client, plan)
    pin = client.pin(plan.chain.keys, 1e12)
    assert pin is not None and store.collect(1e10) == 0
    client.unpin(pin)
    assert store.collect(1e10) == 3


def test_inserts_beyond_the_room_are_refused(store, tmp_path) -> None:
    client = client_of(store, tmp_path, 8)  # two slots may be filling at once
    assert insert(client, client.match(tokens(1, 5))) == [Put.STORED] * 2 + [Put.REFUSED] * 3
    assert client.numbers()["inserts_refused"] == 3


def test_a_callback_that_fails_stops_nothing(store, tmp_path, capsys) -> None:
    client = client_of(store, tmp_path, 16)
    plan = client.match(tokens(1, 1))
    handle = client.insert(plan.chain, 0, [payload(plan.chain.keys[0])], on_done=lambda _: 1 / 0)
    assert handle.done and handle.puts == [Put.STORED]
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert client.match(tokens(1, 1)).blocks == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c, p: c.insert(p.chain, 1, [b""] * 3), r"first, payloads: got blocks 1 to 4, allowed .* 0 to 3"),
        (lambda c, p: c.insert(p.chain, 0, [b"short"]), r"payloads: got one of 5 bytes, allowed are 256"),
        (lambda c, p: c.fetch(p, 1.0, first=1), r"first: got 1, allowed are 0 to 0"),
    ],
)
def test_bad_calls_are_named_and_leave_nothing(store, tmp_path, call, words: str) -> None:
    client = client_of(store, tmp_path, 8)
    with pytest.raises(ValueError, match=words):
        call(client, client.match(tokens(1, 3)))
    assert client.numbers()["filling"] == 0 and len(store.index) == 0
