"""Against a real master that the test starts from the wheel."""

import importlib.util
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_kit import LAYOUT, chain, chain_keys, payload
from target_kit import targets

from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import Put

POLICY = RetentionPolicy(ttl={Retention.AGENT: 100.0, Retention.CHAT: 1000.0}, grace_s=0.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def master(tmp_path_factory) -> Iterator[tuple[str, str]]:
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        pytest.skip("mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"Mooncake's wheel cannot be loaded here ({error}); Debian: apt-get install libibverbs1")
    rpc, http, metrics = free_port(), free_port(), free_port()
    binary = Path(found.submodule_search_locations[0]) / "mooncake_master"
    log = tmp_path_factory.mktemp("mooncake") / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [binary, f"-rpc_port={rpc}", "-rpc_address=127.0.0.1", "-enable_http_metadata_server=true",
             "-http_metadata_server_host=127.0.0.1", f"-http_metadata_server_port={http}",
             "-metrics_host=127.0.0.1", f"-metrics_port={metrics}", "-logtostderr", "-default_kv_lease_ttl=300"],
            stdout=out, stderr=out,
        )  # fmt: skip
    try:
        end = time.monotonic() + 20
        while not (_open(rpc) and _open(http)):
            if server.poll() is not None:
                pytest.skip(f"mooncake_master does not run here: {log.read_text()[-300:]}")
            assert time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.02)
        yield f"127.0.0.1:{rpc}", f"http://127.0.0.1:{http}/metadata"
    finally:
        server.terminate()
        server.wait(20)


def _open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_real_master(master: tuple[str, str]) -> None:
    from orchestrator.cache.store.mooncake import MooncakeStore, connect

    client = connect(*master, segment_bytes=64 << 20, buffer_bytes=16 << 20)
    store = MooncakeStore(client, LAYOUT, 1 << 20, POLICY)
    try:
        blocks, keys = chain(1, 6), chain_keys(1, 6)
        assert store.write(blocks[2:4], 0.0) == [Put.NO_PARENT] * 2
        assert store.write(blocks[:4], 0.0) == [Put.STORED] * 4
        assert store.write(blocks, 1.0) == [Put.ALREADY] * 4 + [Put.STORED] * 2
        assert store.match([*keys, b"x" * 32]) == 6
        assert store.read([*keys, b"x" * 32]) == [*(payload(key) for key in keys), None]

        other = MooncakeStore(client, b"M" * 32, 1 << 20, POLICY)  # another layout: another name space
        assert other.present(keys) == [False] * 6

        client.remove(store._name(keys[3]), True)
        client.put(store._name(keys[3]), b"what somebody else left there")
        assert store.read(keys)[3] is None and store.match(keys) == 3
        assert store.write(blocks[3:4], 2.0) == [Put.STORED] and store.read(keys[3:4]) == [payload(keys[3])]

        assert store.match(keys) == 6 and store.collect(99.0) == 0  # a probe: Mooncake holds them for a moment now
        gone = store.collect(5000.0)
        assert gone == len(keys) and store.read(keys) == [None] * 6
    finally:
        store.close()


def test_a_cluster_is_one_of_twelve_targets(master: tuple[str, str], tmp_path: Path) -> None:
    from orchestrator.cache.erasure.mooncake_target import MooncakeTarget
    from orchestrator.cache.erasure.store import ErasureStore
    from orchestrator.cache.erasure.target_pool import TargetPool
    from orchestrator.cache.store.mooncake import connect

    client = connect(*master, segment_bytes=32 << 20, buffer_bytes=16 << 20)
    try:
        remote = MooncakeTarget(client, "remote")
        others = targets(11)
        store = ErasureStore(tmp_path, LAYOUT, TargetPool([remote, *others]), 1 << 24, POLICY)
        assert store.write(chain(1, 5), 0.0) == [Put.STORED] * 5
        for target in others[:2]:
            target.dead = True  # the remote shard is needed now
        assert store.read(chain_keys(1, 5)) == [payload(key) for key in chain_keys(1, 5)]
        for target in others:
            target.dead = False
        (record,) = store.stripes
        name = f"{record.number:016x}-{record.targets.index('remote'):02d}"
        remote.delete(name)
        for target in others[:2]:
            target.dead = True
        assert store.read(chain_keys(1, 5)) == [None] * 5
        for target in others:
            target.dead = False
        assert store.match(chain_keys(1, 5)) == 5
        store.collect(1.0)
        assert not record.missing and remote.get(name) is not None
        assert store.scan(now=1e12, age_s=0.0) == (0, 0)
        store.close()
    finally:
        client.close()


def test_a_full_cluster_refuses(master: tuple[str, str]) -> None:
    from orchestrator.cache.store.mooncake import MooncakeStore, connect

    store = MooncakeStore(connect(*master, segment_bytes=16 << 20, buffer_bytes=16 << 20), LAYOUT, 3000, POLICY)
    try:
        assert store.write(chain(5, 9), 0.0) == [Put.STORED] * 7 + [Put.FULL, Put.NO_PARENT]
    finally:
        store.close()


def test_no_master_is_an_error_that_says_so() -> None:
    from orchestrator.cache.store.mooncake import connect

    class Dead:
        def setup(self, *arguments: object) -> int:
            return -1

    with pytest.raises(ConnectionError, match="Mooncake master at nowhere:1: setup gave -1"):
        connect("nowhere:1", "http://nowhere", make=Dead)
