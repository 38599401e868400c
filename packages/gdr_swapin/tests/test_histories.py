"""Random histories on simulated streams against a plain model: loads, stores, kernels that change pages, new bytes in
slots, refusals, layers that cannot be queued. Nothing is ever read that the model does not hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gdr_swapin import Busy, HostArena, Loader, Options, PagedPools
from gdr_swapin.cuda import make_engine
from kernel_core.testing.child import load_file

SimGpu = load_file(Path(__file__).parent / "sim_gpu.py").SimGpu
SLOTS, PAGES = 14, 12


class History:
    def __init__(self, layout, method: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.gpu = SimGpu(seed, held=True, batch=method != "copy" or seed % 3 == 0)  # it batches on one stream only
        self.layout = layout
        self.arena, self.pools = HostArena.allocate(layout, SLOTS), PagedPools.allocate(layout, PAGES)
        options = Options(
            staging_bytes=3 << 12, staging_parts=2, piece_bytes=1024, most_in_flight=3, paired=bool(seed % 2),
            order=("layer", "first", "block")[seed % 3], gather_share=0.5, streams=1 + seed % 3, regular_from=3,
        )  # fmt: skip
        engine = make_engine(method, self.arena, self.pools, options, self.gpu)
        self.watched: list[object] = []
        watch = engine._watcher.watch
        engine._watcher.watch = lambda item: (self.watched.append(item), watch(item))
        self.loader = Loader(self.arena, self.pools, engine=engine, options=options)
        self.slots = np.zeros((SLOTS, layout.block_bytes), dtype=np.uint8)  # the model
        self.pages = np.zeros((PAGES, layout.block_bytes), dtype=np.uint8)
        self.unknown: set[int] = set()  # pages of failed loads
        self.open: list[tuple[object, np.ndarray]] = []  # loads that the main stream has not waited for
        self.alive: list[object] = []
        self.wrong: list[str] = []
        self.did: dict[str, int] = {}

    def some(self, low: int, high: int, most: int) -> np.ndarray:
        return self.rng.permutation(np.arange(low, high))[: int(self.rng.integers(1, most))]

    def refill(self) -> str:
        ids = self.some(0, SLOTS, 5)
        try:
            with self.arena.writing(ids) as data:
                fresh = self.rng.integers(0, 256, (len(ids), self.layout.block_bytes), dtype=np.uint8)
                data[torch.from_numpy(ids)] = torch.from_numpy(fresh)
                self.slots[ids] = fresh
        except ValueError:
            return "refill refused"
        return "refilled"

    def load(self) -> str:
        blocks = self.some(1, PAGES, 7)
        slots = self.rng.integers(0, SLOTS, len(blocks))
        module = self.gpu.module
        module.fail_at = len(module.calls) + int(self.rng.integers(0, 6)) if self.rng.random() < 0.2 else None
        try:
            transfer = self.loader.start(slots, blocks)
        except Busy:
            return "busy"
        except ValueError:
            return "load refused"
        finally:
            module.fail_at = None
        self.alive.append(transfer)
        if transfer.failures():
            self.unknown |= set(blocks.tolist())
            self.open.append((None, blocks))
            return "load failed"
        self.unknown -= set(blocks.tolist())
        self.pages[blocks] = self.slots[slots]
        self.open.append((transfer, blocks))
        return "loaded"

    def store(self) -> str:
        free = self.free_pages()
        if not self.loader.engine.stores or len(free) == 0:
            return "no store"
        blocks = self.rng.permutation(free)[:3]
        slots = self.rng.permutation(SLOTS)[: len(blocks)]
        try:
            transfer = self.loader.store(blocks, slots)
        except Busy:
            return "busy"
        except ValueError:
            return "store refused"
        self.alive.append(transfer)
        self.slots[slots] = self.pages[blocks]
        self.open.append((transfer, blocks))
        return "stored"

    def free_pages(self) -> np.ndarray:
        """Pages that the main stream may use."""
        taken = {int(b) for _, blocks in self.open for b in blocks} | self.unknown | {0}
        return np.array([b for b in range(PAGES) if b not in taken], dtype=np.int64)

    def join(self) -> str:
        if not self.open:
            return "nothing open"
        transfer, _ = self.open.pop(int(self.rng.integers(len(self.open))))
        if transfer is not None:
            for layer in self.layout.numbers:
                transfer.wait_layer(layer)
        return "joined"

    def kernel(self) -> str:
        """On the main stream: what it finds has to be what the model says; then it changes the page."""
        free = self.free_pages()
        if len(free) == 0:
            return "no page"
        page = int(self.rng.choice(free))
        expected = torch.from_numpy(self.pages[page].copy())
        flip = int(self.rng.integers(1, 256))

        def run() -> None:
            if not torch.equal(self.pools.gather([page])[0], expected):
                self.wrong.append(f"page {page}")
            for tensor in (*self.pools.main, *self.pools.index):
                tensor[page] ^= flip

        self.gpu.main.push(run)
        self.pages[page] ^= np.uint8(flip)
        return "computed"

    def turn(self) -> str:
        """The device works; a transfer whose last event has passed ends now, so that a seed is one history."""
        for _ in range(int(self.rng.integers(1, 120))):
            self.gpu.step()
        while self.watched and self.watched[0].last.passed:
            with self.gpu.lock:
                self.gpu.turned.notify_all()
            assert self.watched.pop(0).transfer._over.wait(10)
        return "turned"

    def run(self, steps: int) -> None:
        """A random walk, then all that is left."""
        with self.arena.writing(range(0, SLOTS, 2)) as data:
            data.copy_(torch.from_numpy(self.slots))
        moves = [self.refill, self.load, self.load, self.store, self.join, self.join, self.kernel, self.kernel]
        moves += [self.turn] * 3
        for _ in range(steps):
            what = moves[int(self.rng.integers(len(moves)))]()
            self.did[what] = self.did.get(what, 0) + 1
        self.gpu.release()
        self.loader.close()
        self.gpu.run_all()


@pytest.mark.parametrize("method", ["copy", "stage", "mixed", "gather"])
def test_random_histories(method, small):
    did: dict[str, int] = {}
    for seed in range(12):
        history = History(small, method, seed)
        history.run(150)
        assert history.wrong == []
        assert history.loader.in_flight == 0 and all(transfer.ended for transfer in history.alive)
        known = [page for page in range(PAGES) if page not in history.unknown]
        assert torch.equal(history.pools.gather(known), torch.from_numpy(history.pages[known]))
        ready = [slot for slot in range(SLOTS) if history.arena.state(slot) == 2]
        assert torch.equal(history.arena.data[ready], torch.from_numpy(history.slots[ready]))
        assert not any(history.arena.state(slot) == 1 for slot in range(SLOTS))
        history.arena.unregister()  # refuses while a lease is left
        did = {what: did.get(what, 0) + history.did.get(what, 0) for what in {*did, *history.did}}
    usual = {"refilled", "refill refused", "loaded", "load refused", "load failed", "busy", "joined", "computed"}
    assert all(did.get(what, 0) > 0 for what in usual), did
