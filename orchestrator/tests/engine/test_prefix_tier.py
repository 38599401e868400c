"""Blocks from and to the tiers behind the device pool: another engine's work, late work, and none."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from orchestrator.cache.client import CacheClient
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.io.process import IoProcess
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.store.embedded import EmbeddedStore
from orchestrator.commands.errors import UsageError
from orchestrator.commands.prefix import prefix_mode_of, stored_prefixes
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.prefix_plan import PREFIX_MODES
from orchestrator.engine.prefix_tier import PrefixTier
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput

STRIDE = 256


def params(tokens=6):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)


def engine_of(kit, model, mode, client_of=None, **options):
    engine = kit.engine_of(model, prefix_cache=mode, **options)
    engine.prefix.stride = STRIDE
    if client_of is not None:
        engine.prefix.tier = PrefixTier(client_of(engine.prefix.scope))
    return engine


@pytest.fixture
def client_of(nano, tmp_path):
    """A client over one store, each with a host tier of its own."""
    layout = BlockLayout.of(nano.config)
    store = EmbeddedStore(tmp_path / "store", layout.tag, 1 << 22)
    count = iter(range(100))

    def make(scope, slots=16):
        arena = HostArena.create(tmp_path / f"arena{next(count)}", layout.tag, slots, layout.block_bytes)
        return CacheClient.inline(store, arena, scope)

    return make


def one(kit, engine, prompt, tokens=6):
    found, logprobs, _, end = kit.run(engine, {"r": (prompt, params(tokens))})["r"]
    return (found, logprobs), end


@pytest.mark.parametrize("mode", ["bounded", "canonical"])
def test_another_engine_finds_what_one_has_computed(kit, nano, client_of, mode):
    """Prompt and answer; in canonical mode with the bits of a cold run."""
    prompt = kit.prompt_of(600, 1)
    first = engine_of(kit, nano, mode, client_of)
    (answer, _), end = one(kit, first, prompt, 60)
    assert end.cached_tokens == 0
    longer = prompt + answer + kit.prompt_of(40, 2)
    expected, _ = one(kit, engine_of(kit, nano, mode), longer)
    second = engine_of(kit, nano, mode, client_of)
    found, end = one(kit, second, longer)
    assert end.cached_tokens == (640 if mode == "bounded" else 512)
    if mode == "canonical":
        assert found == expected
    else:  # the rows are those of the first engine, bit for bit
        keys = first.prefix.chain_of(longer).keys[:4]
        here, there = (e.cache.save_blocks(e.scheduler.blocks.match(keys)) for e in (first, second))
        assert len(first.scheduler.blocks.match(keys)) == 4
        assert all(torch.equal(a, b) for n in here for a, b in zip(here[n], there[n], strict=True))
    assert second.scheduler.blocks.used == 0 and second.prefix.tier.client.numbers().get("pinned", 0) == 0


def test_exact_fetches_only_where_a_window_is(kit, nano, client_of):
    engine = engine_of(kit, nano, "exact", client_of, num_blocks=10)
    prompt = kit.prompt_of(600, 3)
    cold, _ = one(kit, engine, prompt)
    for i in range(3):
        one(kit, engine, kit.prompt_of(700, 10 + i))  # the pool forgets the first prompt
    assert engine.scheduler.blocks.match(engine.prefix.chain_of(prompt).keys) == []
    hot, end = one(kit, engine, prompt)
    assert hot == cold and end.cached_tokens == 512
    other = engine_of(kit, nano, "exact", client_of)
    again, end = one(kit, other, prompt)
    assert again == cold and end.cached_tokens == 0


def test_a_fetch_cut_short_gives_a_shorter_hit(kit, nano, client_of):
    prompt = kit.prompt_of(900, 4)
    expected, _ = one(kit, engine_of(kit, nano, "canonical", client_of), prompt)
    engine = engine_of(kit, nano, "canonical", lambda scope: client_of(scope, slots=5))
    found, end = one(kit, engine, prompt)
    assert found == expected and end.cached_tokens == 512  # five of six blocks came; the segment begins at four


class Held:
    """A client whose fetches end when the test says so."""

    def __init__(self, client):
        self.client, self.release = client, threading.Event()
        self.fetch_now = client.fetch
        client.fetch = self.fetch

    def fetch(self, plan, deadline_s, *, first=0, on_done=None):
        real = self.fetch_now(plan, deadline_s, first=first)
        held = self

        class Handle:
            @property
            def done(self):
                return held.release.is_set()

            def __getattr__(self, name):
                return getattr(real, name)

        threading.Thread(target=lambda: (self.release.wait(30), on_done(real)), daemon=True).start()
        return Handle()


def test_others_run_while_a_request_waits_for_its_blocks(kit, nano, client_of):
    prompt = kit.prompt_of(600, 5)
    expected, _ = one(kit, engine_of(kit, nano, "canonical", client_of), prompt)
    engine = engine_of(kit, nano, "canonical", client_of)
    held = Held(engine.prefix.tier.client)
    engine.add("late", prompt, params())
    engine.add("other", kit.prompt_of(100, 6), params())
    ended = []
    while "other" not in ended:
        ended += [e.request_id for e in engine.step() if isinstance(e, Finished)]
    assert engine.has_work and engine.scheduler.stuck and engine.step() == []
    held.release.set()
    events = []
    while engine.has_work:
        events += engine.step()
    assert [e.token_id for e in events if isinstance(e, TokenOutput)] == expected[0]
    assert events[-1].cached_tokens == 512


def test_an_abort_gives_a_fetch_up(kit, nano, client_of):
    prompt = kit.prompt_of(600, 7)
    one(kit, engine_of(kit, nano, "canonical", client_of), prompt)
    engine = engine_of(kit, nano, "canonical", client_of)
    held = Held(engine.prefix.tier.client)
    engine.add("late", prompt, params())
    engine.abort("late")
    held.release.set()
    assert engine.take_events()[-1].reason == "abort" and not engine.has_work
    assert engine.prefix.tier.client.numbers()["pinned"] == 0 and engine.scheduler.blocks.used == 0


def test_rows_without_a_distribution_are_not_stored(kit, nano, client_of, monkeypatch):
    engine, prompt = engine_of(kit, nano, "bounded", client_of), kit.prompt_of(600, 8)
    whole = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda *given: whole(*given) * torch.nan)
    _, end = one(kit, engine, prompt)
    assert end.reason == "error"
    assert engine.prefix.tier.match(prompt, engine.prefix.root_of("")).blocks == 0


def test_a_process_that_comes_and_goes(kit, nano, tmp_path):
    """Through the real I/O process: a hit across engines; and an engine whose process was killed goes on."""
    layout = BlockLayout.of(nano.config)
    spec = {"kind": "embedded", "folder": str(tmp_path / "store"), "capacity": 1 << 24}
    process = IoProcess(tmp_path / "io", spec, layout.tag, layout.block_bytes, 32)
    process.start()
    try:

        def attached(mode):
            return engine_of(kit, nano, mode, lambda scope: CacheClient(process.socket_path, process.arena_path, scope))

        prompt = kit.prompt_of(600, 9)
        first = attached("canonical")
        expected, _ = one(kit, first, prompt)
        second = attached("canonical")
        for _ in range(200):  # what was handed over becomes visible when it is durable
            if second.prefix.tier.match(prompt, second.prefix.root_of("")).blocks == 4:
                break
        found, end = one(kit, second, prompt)
        assert found == expected and end.cached_tokens == 512
    finally:
        process.stop()
    third = kit.prompt_of(300, 10)
    assert one(kit, second, third)[0] == one(kit, engine_of(kit, nano, "canonical"), third)[0]
    for engine in (first, second):
        engine.prefix.tier.client.close()


def test_a_folder_outlives_its_engine(kit, nano, nano_path, tmp_path):
    prompt, outcomes = kit.prompt_of(600, 11), []
    for _ in range(2):
        engine = engine_of(kit, nano, "canonical")
        with stored_prefixes(engine, tmp_path / "kept", 0.1, nano_path):
            outcomes.append(one(kit, engine, prompt))
    assert outcomes[0][0] == outcomes[1][0]
    assert [end.cached_tokens for _, end in outcomes] == [0, 512]
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--cache-folder"), stored_prefixes(
        engine_of(kit, nano, "canonical"), tmp_path / "file" / "below", 0.1, nano_path
    ):  # fmt: skip
        pass


TIED = """
import sys, time
from pathlib import Path
from orchestrator.cache.io.process import IoProcess
folder = Path(sys.argv[1])
store = {"kind": "embedded", "folder": str(folder / "store"), "capacity": 1 << 22}
IoProcess(folder / "io", store, bytes(32), 256, 4, tied=True).start()
print("up", flush=True)
time.sleep(60)
"""


def test_the_io_process_ends_with_a_server_that_was_killed(tmp_path):
    """Else it would keep the store's lock, and no server could open the folder again."""
    server = subprocess.Popen([sys.executable, "-c", TIED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "up\n"
    assert (tmp_path / "io").exists()
    server.kill()
    server.wait()
    for _ in range(200):
        if not (tmp_path / "io").exists():
            break
        time.sleep(0.05)
    assert not (tmp_path / "io").exists()
    EmbeddedStore(tmp_path / "store", bytes(32), 1 << 22).close()


def test_modes_that_the_command_line_takes():
    assert prefix_mode_of(None, True) == "exact" and prefix_mode_of(None, False) == "bounded"
    assert prefix_mode_of(None, True, stored=True) == "canonical"
    assert [prefix_mode_of(m, True) for m in PREFIX_MODES] == list(PREFIX_MODES)
    with pytest.raises(UsageError, match="--prefix-cache: got 'on', allowed are off, bounded, exact, canonical"):
        prefix_mode_of("on", True)
    for bad in ({"prefix_cache": "on"}, {"window_bytes": -1}, {"prefix_cache": "exact", "decoder_prefill": "exact"}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}: got"):
            EngineConfig(**bad)
