"""A rank ends without a word: the others serve on, and no token is lost or comes twice."""

from __future__ import annotations

import pytest
from ep_kit import EpOptions, alone, config, requests, start, together

from orchestrator.balance.eplb import EplbSettings

SPARE = EplbSettings(redundant=3, window=8, interval=0)
PLANS = EplbSettings(redundant=3, window=8, interval=16, least_tokens=0.0, least_gain=0.0)


@pytest.mark.parametrize(
    "fault",
    [("dispatch", 0), ("dispatch", 12 * 7 + 5), ("combine", 12 * 9 + 11), ("dispatch", 12 * 20)],
    ids=["first call", "in dispatch", "in combine", "between steps"],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_tokens_after_a_death(nano, fault, victim):
    asked = requests(5, tokens=20)
    options = EpOptions(4, engine=config(), eplb=SPARE, timeout=1.0)
    group = start(nano, options, faults={victim: fault})
    heard = together(group, asked)
    members = group.members
    group.close()
    assert heard == alone(nano, asked)
    assert victim not in members and len(members) == 3 and group.epoch == 2
    (resize,) = group.resizes
    assert resize.lost == (victim,) and resize.ranks == 3 and resize.seconds < 10
    assert len({said.collectives for said in group.left.values()}) == 1


def test_death_while_experts_move_and_again(nano):
    """Two deaths one after the other, the first while a plan is being carried out."""
    asked = requests(5, tokens=12)
    options = EpOptions(5, slots=4, engine=config(), eplb=PLANS, bytes_per_step=500, timeout=1.0)
    group = start(nano, options, faults={1: ("combine", 12 * 9), 4: ("dispatch", 12 * 14)})
    heard = together(group, asked)
    group.close()
    assert heard == alone(nano, asked)
    assert [r.lost for r in group.resizes] == [(1,), (4,)] and group.epoch == 3


def test_too_few_left(nano):
    asked = requests(4, tokens=30)
    group = start(nano, EpOptions(2, slots=4, engine=config(), timeout=1.0), faults={1: ("dispatch", 12 * 10)})
    heard = together(group, asked)
    group.close()
    assert all(said[-1] == "error" for said in heard.values()) and len(heard) == 4
    with pytest.raises(RuntimeError, match="cannot hold 8 experts"):
        group.submit(*asked[0])
