"""A rank ends without a word: the others go on with what they have, and no token is lost or comes twice."""

from __future__ import annotations

import random

import pytest
from ep_kit import EpOptions, alone, config, requests, start, together

from orchestrator.balance.eplb import EplbSettings
from orchestrator.engine.launch import InOrder
from orchestrator.engine.launch import Worker as Behind

SPARE = EplbSettings(redundant=3, window=8, interval=0)
PLANS = EplbSettings(redundant=3, window=8, interval=16, least_tokens=0.0, least_gain=0.0)
CALLS = 15  # dispatches of a step: 12 layers, 3 draft stages
STEPS = {"one by one": None, "overlapped": InOrder, "behind": Behind}


@pytest.fixture(scope="module")
def expected(nano):
    return alone(nano, requests(5, tokens=6))


def after_a_death(nano, fault, victim, launcher=None, **options):
    """What four ranks say of which one dies, with its resize and the workers that are left."""
    workers = {}
    settings = EpOptions(4, engine=config(**options), eplb=SPARE, timeout=2.0)
    group = start(nano, settings, faults={victim: fault}, launcher=launcher, workers=workers)
    heard = together(group, requests(5, tokens=6))
    members = group.members
    group.close()
    assert victim not in members and len(members) == 3 and group.epoch == 2
    assert len({(said.collectives, said.steps) for said in group.left.values()}) == 1
    (resize,) = group.resizes
    assert resize.lost == (victim,) and resize.ranks == 3 and resize.seconds < 10
    return heard, resize, {number: workers[number] for number in members}, group


@pytest.mark.parametrize(
    ("victim", "fault", "steps"),
    [
        (0, ("dispatch", 0), "one by one"),
        (2, ("dispatch", CALLS + 7), "one by one"),  # a prompt's second chunk: layers before it have overwritten rings
        (3, ("dispatch", 5 * CALLS + 13), "overlapped"),  # in a draft stage
        (3, ("dispatch", 5 * CALLS + 3), "behind"),
        (1, ("combine", 7 * CALLS - 1), "behind"),  # in the last collective of a step
    ],
    ids=["first", "prompt", "draft, overlapped", "layer, behind", "last, behind"],
)
def test_tokens_after_a_death(nano, expected, victim, fault, steps):
    heard, resize, left, group = after_a_death(nano, fault, victim, STEPS[steps])
    assert heard == expected
    # Five requests on four ranks: the first worker has two of them, and one may have ended before.
    assert resize.replayed == (2 if victim == 0 else 1) and 4 <= resize.kept + resize.replayed <= 5
    # Each prompt was computed once by those who are left: nobody but the dead rank's requests began again.
    assert sum(said.prompt_tokens for said in group.left.values()) == sum(len(p) for p, _ in requests(5))
    assert not any(worker.engine.scheduler.has_work for worker in left.values())
    for worker in left.values():
        pool = worker.engine.scheduler.blocks
        assert pool.free == worker.engine.config.num_blocks and pool.fenced == 0
    if fault == ("dispatch", CALLS + 7):
        assert left[1].engine.runner.undo.taken_back == 1


@pytest.mark.parametrize("seed", range(3))
def test_deaths_at_drawn_points(nano, expected, seed):
    rng = random.Random(seed)
    fault = (rng.choice(["dispatch", "combine"]), rng.randrange(CALLS * 9))
    speculation = rng.choice(["off", 2, "scheduled"])
    options = rng.choice([{}, {"num_blocks": 3, "max_num_seqs": 2}, {"prefix_cache": "exact"}])  # the second one parks
    launcher = rng.choice(list(STEPS.values()))
    heard, _, _, _ = after_a_death(nano, fault, rng.randrange(4), launcher, speculation=speculation, **options)
    assert heard == expected


def test_death_while_experts_move_and_again(nano, expected):
    """Two deaths one after the other, the first while a plan is being carried out."""
    options = EpOptions(5, slots=4, engine=config(), eplb=PLANS, bytes_per_step=500, timeout=2.0)
    group = start(nano, options, faults={1: ("combine", CALLS * 6), 4: ("dispatch", CALLS * 9)})
    heard = together(group, requests(5, tokens=6))
    group.close()
    assert heard == expected
    assert [r.lost for r in group.resizes] == [(1,), (4,)] and group.epoch == 3


def test_too_few_left(nano):
    asked = requests(4, tokens=20)
    group = start(nano, EpOptions(2, slots=4, engine=config(), timeout=1.0), faults={1: ("dispatch", CALLS * 5)})
    heard = together(group, asked)
    group.close()
    assert all(said[-1] == "error" for said in heard.values()) and len(heard) == 4
    with pytest.raises(RuntimeError, match="cannot hold 8 experts"):
        group.submit(*asked[0])
