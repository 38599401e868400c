"""Expert-parallel engines of threads, with what a test does to them: faults, delays, requests, expected tokens."""

from __future__ import annotations

import random

import ep_comm
from orchestrator.cluster.local_ep import LocalExpertParallel
from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.plan_process import PlanHere
from orchestrator.cluster.worker import Killed, Worker
from orchestrator.cluster.workers import ThreadWorkers
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput
from orchestrator.model.expert_parallel import LoadedExperts
from orchestrator.model.transformer import Transformer


class Fuse:
    """A data link that ends its rank without a word at the n-th call of a kind."""

    def __init__(self, link, kind, at):
        self._link, self._kind, self._left = link, kind, at

    def __getattr__(self, name):
        return getattr(self._link, name)

    def _burn(self, kind):
        if kind == self._kind:
            self._left -= 1
            if self._left < 0:
                raise Killed

    def dispatch(self, *args, **options):
        self._burn("dispatch")
        return self._link.dispatch(*args, **options)

    def combine(self, *args, **options):
        self._burn("combine")
        return self._link.combine(*args, **options)


def start(model, options, *, faults=None, delays=None, workers=None, transport=None, launcher=None):
    """`faults`: worker -> (kind, n), counted anew in every epoch. `workers` receives the `Worker` objects by number.

    `launcher` makes each worker's device for overlapped steps.
    """
    faults = dict(faults or {})
    options = options.resolved(model.config)

    def run(number, mailbox):
        def wrap(link):
            return Fuse(link, *faults[number]) if number in faults else link

        copy = Transformer(model.weights, model.tables)
        source = LoadedExperts(model.weights)
        device = launcher() if launcher is not None else None
        worker = Worker(
            number, options, copy, None, source, mailbox, planner=PlanHere, wrap=wrap, delays=delays, launcher=device
        )  # fmt: skip
        if workers is not None:
            workers[number] = worker
        try:
            worker.run()
        except Killed:
            return
        finally:
            if device is not None:
                device.close()

    threads = ThreadWorkers(options.ranks, options, model.config, run, transport or ep_comm.threads)
    return LocalExpertParallel(threads, options, model.config)


def config(**options):
    return EngineConfig(**({"num_blocks": 48, "max_num_seqs": 4, "max_step_tokens": 64, "chunk_tokens": 64} | options))


def requests(count=5, tokens=14, vocab=500):
    """Greedy and seeded ones, one of them with a prompt of several chunks, ending at different times."""
    rng = random.Random(7)
    made = []
    for i in range(count):
        prompt = [rng.randrange(vocab) for _ in range(150 if i == 1 else 5 + 3 * i)]
        seeded = SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=tokens + 5 * i, ignore_eos=True)
        made.append((prompt, seeded))
    return made


def alone(model, asked, engine=None):
    """What one rank with all experts says: tokens and reason by request."""
    one = Engine(Transformer(model.weights, model.tables), None, engine or config())
    for i, (prompt, params) in enumerate(asked):
        one.add(f"{i}", prompt, params)
    heard = {}
    while one.has_work:
        listen(heard, one.step())
    return heard


def together(group, asked):
    """The same from a group."""
    heard = {}
    for prompt, params in asked:
        group.submit(prompt, params)
    for event in group.events():
        listen(heard, [event])
    return heard


def listen(heard, events):
    for event in events:
        said = heard.setdefault(event.request_id, [])
        assert "length" not in said and "error" not in said, f"{event} after the end"
        if isinstance(event, TokenOutput):
            said.append(event.token_id)
        elif isinstance(event, Finished):
            said.append(event.reason)


__all__ = ["EpOptions", "alone", "config", "requests", "start", "together"]
