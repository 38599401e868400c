"""Engines over several ranks: the tokens of one rank, the same number of collectives on all."""

from __future__ import annotations

import pytest
from ep_kit import EpOptions, alone, config, listen, requests, start, together

from orchestrator.engine.launch import InOrder
from orchestrator.engine.launch import Worker as Behind

LAYERS, STAGES = 12, 3  # of v41-nano
BEHIND = {"one by one": None, "overlapped": InOrder, "overlapped, behind": Behind}


def collectives(group, stages=STAGES):
    """All ranks made the same number: two a layer and stage, in every step."""
    (made,) = {(said.steps, said.collectives) for said in group.left.values()}
    assert made[0] > 5 and made[1] == 2 * (LAYERS + stages) * made[0]
    return made


@pytest.fixture(scope="module")
def expected(nano):
    """Of one rank without drafts; its own drafts change nothing (`orchestrator/tests/engine`)."""
    return alone(nano, requests(5, tokens=8), config(speculation="off"))


@pytest.mark.parametrize(
    ("ranks", "speculation", "steps"),
    [
        (1, 5, "overlapped"),
        (2, "off", "overlapped, behind"),
        (3, 3, "one by one"),
        (3, 5, "overlapped, behind"),
        (4, "scheduled", "overlapped"),
        (7, "scheduled", "one by one"),
    ],
)
def test_tokens_are_those_of_one_rank(nano, expected, ranks, speculation, steps):
    group = start(nano, EpOptions(ranks, engine=config(speculation=speculation)), launcher=BEHIND[steps])
    heard = together(group, requests(5, tokens=8))
    group.close()
    assert heard == expected
    assert len(group.left) == ranks
    collectives(group, 0 if speculation == "off" else STAGES)


def test_preemption_and_more_requests_than_slots(nano):
    asked = requests(6, tokens=8)
    tight = config(num_blocks=3, max_num_seqs=2)
    expected = alone(nano, asked, tight)
    workers = {}
    group = start(nano, EpOptions(3, engine=tight), workers=workers)
    assert together(group, asked) == expected
    group.close()
    assert len({said.collectives for said in group.left.values()}) == 1


def test_an_aborted_request_ends_and_the_others_go_on(nano):
    asked = requests(4, tokens=30)
    expected = alone(nano, asked)
    group = start(nano, EpOptions(2, engine=config()))
    ids = [group.submit(prompt, params) for prompt, params in asked]
    heard = {}
    while len(heard.get(ids[2], [])) < 3:
        listen(heard, group.poll())
    group.abort(ids[2])
    group.abort("nobody")
    for event in group.events():
        listen(heard, [event])
    group.close()
    assert heard[ids[2]][-1] == "abort"
    said = heard[ids[2]][:-1]
    assert said == expected[ids[2]][: len(said)] and len(said) < len(expected[ids[2]])
    for other in (ids[0], ids[1], ids[3]):
        assert heard[other] == expected[other]


def test_a_bad_request_is_refused_and_nothing_stops(nano):
    asked = requests(2)
    group = start(nano, EpOptions(2, engine=config()))
    bad = group.submit([999_999], asked[0][1])
    events = list(group.events())
    assert [e.reason for e in events if e.request_id == bad] == ["error"]
    assert "999999" in events[0].error
    good = group.submit(*asked[0])
    assert [e.reason for e in group.events() if hasattr(e, "reason") and e.request_id == good] == ["length"]
    group.close()


def test_options_that_cannot_be(nano):
    for bad, name in (
        ({"ranks": 0}, "ranks"),
        ({"ranks": 3, "slots": 2}, "slots"),
        ({"ranks": 2, "timeout": 0}, "timeout"),
        ({"ranks": 2, "bytes_per_step": 0}, "bytes_per_step"),
        ({"ranks": 2, "domain": -1}, "domain"),
        ({"ranks": 2, "patience": 0}, "patience"),
        ({"ranks": 2, "statistics": "vision"}, "statistics"),
    ):
        with pytest.raises(ValueError, match=name):
            EpOptions(**bad).resolved(nano.config)
