"""Overlapped steps in lockstep: ranks agree on the next step while this one runs, and flips stand between steps."""

from __future__ import annotations

import threading

from orchestrator.engine.launch import Worker
from orchestrator.engine.lockstep import Lockstep
from orchestrator.engine.request import SamplingParams


class Agreements:
    """A group of one that counts; `after` waits for the next agreement."""

    def __init__(self):
        self.made, self.changed = 0, threading.Condition()

    def any(self, mine):
        with self.changed:
            self.made += 1
            self.changed.notify_all()
        return mine

    def after(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: self.made > number, 20), "nobody agrees before the step has ended"


class Unhurried(Worker):
    """A device on which no forward pass runs before the host has agreed on the step behind it."""

    def __init__(self, agreements):
        super().__init__()
        self.agreements, self.order = agreements, []

    def launch(self, work, name="work"):
        number = self.agreements.made

        def later():
            if name.startswith("F"):
                self.agreements.after(number)
            self.order.append(name)
            work()

        return super().launch(later, name)


def test_agreement_and_flips_while_a_step_runs(kit, nano):
    requests = {
        str(i): (kit.prompt_of(9 + 5 * i, i), SamplingParams(seed=i, max_tokens=18, ignore_eos=True, logprobs=0))
        for i in range(3)
    }
    expected = kit.run(kit.engine_of(nano), requests)
    agreements, engine = Agreements(), kit.engine_of(nano)
    device = Unhurried(agreements)
    engine.overlap(device)
    engine.lockstep = Lockstep(agreements)
    flipped, wanted = [], []
    for name, (prompt, params) in requests.items():
        engine.add(name, list(prompt), params)
    engine.lockstep.agree(True)
    agree = agreements.any

    def any_and_flip(mine):
        if agreements.made % 3 == 0 and mine:  # as a turn of rank 0 would have it
            wanted.append(len(wanted))
            engine.flip(lambda number=wanted[-1]: (flipped.append(number), device.order.append("flip")))
        return agree(mine)

    agreements.any = any_and_flip
    assert kit.finish(engine) == expected
    engine.pipeline.drain()
    device.close()
    overlapped = [name for name in device.order if name[0] in "FS"]
    assert len(overlapped) > 10 and flipped == wanted and len(flipped) > 2
    for before, at in zip(device.order, device.order[1:], strict=False):  # never between F and S of one step
        assert not (before.startswith("F") and at == "flip")
