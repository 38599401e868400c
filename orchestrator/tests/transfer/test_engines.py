"""A request of a real engine goes on in another one, over each kind of link.

Its parts are on their way while its prompt is read.
"""

from __future__ import annotations

import random
import threading

import pytest
from transfer_kit import KINDS, WAIT, Wired

torch = pytest.importorskip("torch")

from orchestrator.engine.config import EngineConfig  # noqa: E402
from orchestrator.engine.engine import Engine  # noqa: E402
from orchestrator.engine.handoff.handoffs import Handoffs  # noqa: E402
from orchestrator.engine.handoff.parts import handoff_of  # noqa: E402
from orchestrator.engine.request import SamplingParams, TokenOutput  # noqa: E402
from orchestrator.transfer import Limits, Times  # noqa: E402

PROMPT = [random.Random(7).randrange(500) for _ in range(400)]
PARAMS = SamplingParams(seed=3, temperature=0.8, max_tokens=16, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    from orchestrator.model.load import load_model
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    torch.set_num_threads(1)
    return load_model(make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20))


def engine_of(nano):
    return Engine(nano, None, EngineConfig(num_blocks=16, max_num_seqs=2, chunk_tokens=130, speculation=3))


def said(events):
    return [(e.token_id, e.logprob) for e in events if isinstance(e, TokenOutput)]


def finish(engine):
    events = []
    while engine.has_work:
        events += engine.step()
    assert engine.scheduler.blocks.used == engine.scheduler.slots.used == 0
    return said(events)


@pytest.fixture(scope="module")
def expected(nano):
    engine = engine_of(nano)
    engine.add("r", PROMPT, PARAMS)
    return finish(engine)


class Target:
    """The decode side, in a thread: room by the first part, each next one to its place, then it decodes."""

    def __init__(self, wired, engine, handoff):
        self.error, self.tokens, self.came = None, [], threading.Semaphore(0)
        self._wired, self._engine, self._handoff = wired, engine, handoff
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            with self._wired.pull(self._handoff, 4) as pull:
                coming = Handoffs(self._engine).reserve(*pull.take(timeout=30))
                self.came.release()
                for name, data in pull.parts(timeout=30):
                    coming.put(name, data)
                    self.came.release()
                coming.commit()
                pull.done(timeout=WAIT)
            self.tokens = finish(self._engine)
        except Exception as error:
            self.error = error


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_here_and_decode_there(kind, nano, expected):
    first, second = engine_of(nano), engine_of(nano)
    largest = Limits(held=1 << 20, window=1 << 16)
    with Wired(kind, largest, Times(lease=30), ring_bytes=1 << 16) as wired:
        first.add("r", PROMPT, PARAMS, leaves_at=1)
        leaving = Handoffs(first).begin("r")
        parts = leaving.take()
        handoff = handoff_of(parts[0].data)
        offered = wired.sender.offer(handoff, 4)
        target = Target(wired, second, handoff)
        events, early, count = [], 0, 0
        while not leaving.due:
            for part in parts:
                offered.put(*part, timeout=30)
            for _ in parts:
                assert target.came.acquire(timeout=30), target.error
            early, count = count + len(parts), count + len(parts)
            events += first.step()
            leaving.collect()
            parts = leaving.take()
        leaving.close()
        for part in parts + leaving.take():
            offered.put(*part, timeout=30)
            count += 1
        offered.finish()
        offered.wait(timeout=30)
        assert leaving.done()
        target.thread.join()
        assert target.error is None
        assert 1 < early < count  # rows of the first chunks were at the target before the last chunk was read
        assert said(events) + target.tokens == expected and len(said(events)) == 1
        assert finish(first) == []
    assert wired.sender.held == 0
