"""Window snapshots of running engines: taken while steps overlap and drafts are rejected, and had from peers."""

from __future__ import annotations

import random
import socket
import threading

import pytest
import torch

from orchestrator.cache.client import CacheClient
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.store.embedded import EmbeddedStore
from orchestrator.cache.window_peer import TcpPeer, WindowServer
from orchestrator.cache.windows import WindowKey
from orchestrator.commands.errors import UsageError
from orchestrator.commands.prefix import address_of, shared_windows
from orchestrator.commands.serve import ServeOptions, serve
from orchestrator.engine.prefix_tier import PrefixTier
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput


def params(tokens, seed=5):
    return SamplingParams(seed=seed, max_tokens=tokens, ignore_eos=True, logprobs=0)


def one(kit, engine, prompt, tokens=6):
    found, logprobs, _, end = kit.run(engine, {"r": (prompt, params(tokens))})["r"]
    return (found, logprobs), end


def poison(engine):
    """Rings and tails of nobody hold what must not be read."""
    engine.cache.rings.fill_(0x7F)
    for tail in engine.cache.tails.values():
        tail.fill_(torch.nan)


def keys_of(engine, tokens):
    return [WindowKey(key, 128 * (n + 1)) for n, key in enumerate(engine.prefix.chain_of(tokens).keys)]


@pytest.mark.parametrize(("mode", "drafts"), [
    ("alone", 5), ("in order", "off"), ("in order", 5), ("worker", "off"), ("worker", 3),
])  # fmt: skip
def test_decode_leaves_a_window_at_every_boundary(kit, nano, mode, drafts):
    """Whatever of the drafts is rejected, what goes on from an answer has the bits of a run without a cache."""
    prompt = kit.prompt_of(100, 1)
    plain = kit.engine_of(nano, speculation="off")
    (answer, expected), _ = one(kit, plain, prompt, 170)
    engine = kit.engine_of(nano, prefix_cache="exact", mode=mode, speculation=drafts)
    if drafts != "off":
        rng = random.Random(f"{mode} {drafts}")
        kit.tutor(engine, {5: prompt + answer}, lambda seed, position: rng.randrange(drafts + 1))
    assert one(kit, engine, prompt, 170)[0] == (answer, expected)
    if drafts != "off":
        assert 0 < engine.stats.accepted < engine.stats.drafts
    known = keys_of(engine, prompt + answer[:169])  # of the last token nothing is computed
    assert [engine.prefix.windows.has(key) for key in known] == [True] * 2
    for boundary in (256, 128):
        poison(engine)
        longer = (prompt + answer)[: boundary + 5] + kit.prompt_of(150, boundary)
        found, end = one(kit, engine, longer)
        assert end.cached_tokens == boundary
        assert found == one(kit, plain, longer)[0], boundary


def test_windows_of_several_requests_at_once(kit, nano):
    """Their boundaries come in different steps, one is aborted on the way, slots are used again."""
    prompts = {f"{n}": kit.prompt_of(90 + 7 * n, 10 + n) for n in range(6)}
    engine = kit.engine_of(nano, prefix_cache="exact", mode="worker", speculation=3, max_num_seqs=3)
    for number, (name, prompt) in enumerate(prompts.items()):
        engine.add(name, prompt, params(60, seed=number))
    before = []
    for _ in range(12):
        before += engine.step()
    engine.abort("1")
    outcome = kit.finish(engine)
    answers = {
        name: [e.token_id for e in before if isinstance(e, TokenOutput) and e.request_id == name] for name in prompts
    }
    plain = kit.engine_of(nano, speculation="off")
    for name, prompt in prompts.items():
        if name != "1":
            poison(engine)
            longer = prompt + answers[name] + outcome[name][0] + kit.prompt_of(120, 77)
            found, end = one(kit, engine, longer)
            assert end.cached_tokens == 128 and found == one(kit, plain, longer)[0], name
    assert len(engine.scheduler.running) == 0 and engine.scheduler.slots.used == 0


def test_a_request_that_fails_takes_overlapped_windows_back(kit, nano, monkeypatch):
    engine, prompt = (
        kit.engine_of(nano, prefix_cache="exact", mode="in order", speculation="off"),
        kit.prompt_of(100, 2),
    )
    engine.add("r", prompt, params(200))
    while not engine.scheduler.running or len(engine.scheduler.running[0].tokens) < 140:
        engine.step()
    sequence = engine.scheduler.running[0]
    key = keys_of(engine, sequence.tokens)[0]
    assert engine.prefix.windows.has(key)
    whole = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda batch, recorder=None: whole(batch, recorder) * torch.nan)
    assert kit.finish(engine)["r"][3].reason == "error"
    assert not engine.prefix.windows.has(key) and engine.scheduler.blocks.match([key.chain]) == []


STRIDE = 256


@pytest.fixture
def node_of(kit, nano, tmp_path):
    """Engines that share a store of blocks and have windows of their own."""
    layout = BlockLayout.of(nano.config)
    store = EmbeddedStore(tmp_path / "store", layout.tag, 1 << 22)
    count = iter(range(100))

    def make(prefix, peers=(), **options):
        engine = kit.engine_of(nano, prefix_cache=prefix, **options)
        engine.prefix.stride = STRIDE
        engine.prefix.name_model(b"nano")
        arena = HostArena.create(tmp_path / f"arena{next(count)}", layout.tag, 16, layout.block_bytes)
        engine.prefix.tier = PrefixTier(CacheClient.inline(store, arena, engine.prefix.scope))
        if peers:
            engine.prefix.ask(peers, deadline_s=10.0)
        return engine

    return make


@pytest.fixture
def peer_of():
    servers = []

    def make(engine):
        servers.append(WindowServer(engine.prefix.windows))
        return TcpPeer(*servers[-1].address, timeout_s=10.0)

    yield make
    for server in servers:
        server.close()


@pytest.mark.parametrize(("mode", "steps"), [
    ("exact", "alone"), ("exact", "worker"), ("canonical", "worker"), ("bounded", "alone"),
])  # fmt: skip
def test_a_window_of_another_node_makes_a_hit_exact(kit, nano, node_of, peer_of, mode, steps):
    """Blocks from the store, windows from a peer: the bits of a cold run, in every mode."""
    prompt = kit.prompt_of(600, 3)
    first = node_of(mode, mode=steps)
    cold, _ = one(kit, first, prompt, 70)
    longer = prompt + cold[0] + kit.prompt_of(150, 4)
    expected = one(kit, kit.engine_of(nano, prefix_cache="off"), longer)[0]
    if mode == "canonical":
        other = kit.engine_of(nano, prefix_cache="canonical")
        other.prefix.stride = STRIDE
        expected = one(kit, other, longer)[0]
    second = node_of(mode, [peer_of(first)], mode=steps)
    poison(second)
    found, end = one(kit, second, longer)
    assert found == expected and end.cached_tokens == 640
    assert second.prefix.windows.counters["pulled"] == 1
    found, end = one(kit, second, longer)  # one of its own lies further now
    assert found == expected and end.cached_tokens == 768 and second.prefix.windows.counters["pulled"] == 1


def test_peers_that_fail_lie_or_sleep_cost_time_only(kit, nano, node_of):
    prompt = kit.prompt_of(600, 5)
    first = node_of("exact")
    expected, _ = one(kit, first, prompt)

    class Gone:
        def first(self, keys):
            raise ConnectionRefusedError("gone")

    class Liar:
        def first(self, keys):
            found = first.prefix.windows.first(keys)
            return None if found is None else (found[0], found[1][:-1] + bytes([found[1][-1] ^ 1]))

    asleep = threading.Event()

    class Asleep:
        def first(self, keys):
            asleep.wait(30)

    second = node_of("exact", [Gone(), Liar()])
    found, end = one(kit, second, prompt)
    assert found == expected and end.cached_tokens == 0
    assert second.prefix.windows.counters["peer_errors"] == 1 and second.prefix.windows.counters["wrong"] == 1
    third = node_of("exact", [Asleep()])
    third.prefix.ask([Asleep()], deadline_s=0.05)
    third.add("gone", prompt, params(6))
    third.abort("gone")
    third.take_events()
    found, end = one(kit, third, prompt)
    assert found == expected and end.cached_tokens == 0
    asleep.set()


def test_others_run_while_a_window_is_asked_for(kit, nano, node_of):
    prompt = kit.prompt_of(600, 6)
    first = node_of("exact")
    expected, _ = one(kit, first, prompt)
    go = threading.Event()

    class Late:
        def first(self, keys):
            assert go.wait(30)
            return first.prefix.windows.first(keys)

    engine = node_of("exact", [Late()])
    engine.add("late", prompt, params(6))
    engine.add("other", kit.prompt_of(100, 7), params(6))
    ended = []
    while "other" not in ended:
        ended += [e.request_id for e in engine.step() if isinstance(e, Finished)]
    assert engine.scheduler.stuck and engine.step() == []
    go.set()
    tokens, logprobs, _, end = kit.finish(engine)["late"]
    assert (tokens, logprobs) == expected and end.cached_tokens == 512


def test_only_what_helps_is_asked_for(kit, nano, node_of):
    """Nothing for a cold prompt, nothing where the window is here, nobody's windows under another salt."""
    asked = []

    class Noting:
        def first(self, keys):
            asked.append([key.boundary for key in keys])

    engine = node_of("exact", [Noting()])
    prompt = kit.prompt_of(600, 8)
    one(kit, engine, prompt)
    one(kit, engine, prompt)
    engine.add("r", prompt, SamplingParams(seed=5, max_tokens=2, cache_salt="other"))
    kit.finish(engine)
    assert asked == []
    one(kit, engine, kit.prompt_of(600, 8)[:390] + kit.prompt_of(300, 9))
    assert asked == [[384]] or asked == [[384, 256, 128]]
    with pytest.raises(ValueError, match="peers: got some before name_model was called"):
        kit.engine_of(nano, prefix_cache="exact").prefix.ask([Noting()])


def test_servers_share_windows_by_their_options(kit, nano, nano_path):
    """Two engines with the same blocks, one without their windows: it has them from the other's address."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"127.0.0.1:{door.getsockname()[1]}"
    prompt = kit.prompt_of(600, 30)
    first, second = (kit.engine_of(nano, prefix_cache="exact") for _ in range(2))
    with shared_windows(first, address, (), nano_path), shared_windows(second, None, (address,), nano_path):
        second.prefix.pulls._deadline_s = second.prefix.windows.peers[0]._timeout_s = 10.0
        expected, _ = one(kit, first, prompt)
        one(kit, second, prompt)
        for key in list(second.prefix.windows._kept):
            second.prefix.windows.drop(key)
        poison(second)
        found, end = one(kit, second, prompt)
        assert found == expected and end.cached_tokens == 512 and second.prefix.windows.counters["pulled"] == 1
        with (
            pytest.raises(UsageError, match=r"--window-listen: .* cannot be used"),
            shared_windows(second, address, (), nano_path),
        ):
            pass
    for text in ("", "8000", ":8000", "host:", "host:0", "host:70000", "host:x"):
        with pytest.raises(UsageError, match=r"--window-peer: got .*, allowed is HOST:PORT"):
            address_of("--window-peer", text)
    assert address_of("--window-peer", "[::1]:80") == ("::1", 80)
    with pytest.raises(UsageError, match="--window-peer: got 'a:1' and no prefix cache"):
        serve(ServeOptions(prefix_cache="off", window_peer=("a:1",)))
