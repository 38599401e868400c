"""Engines over several ranks: the tokens of one rank, the same number of collectives on all."""

from __future__ import annotations

import pytest
from ep_kit import EpOptions, alone, config, requests, start, together

LAYERS = 12  # of v41-nano


@pytest.mark.parametrize(("ranks", "speculation"), [(1, "off"), (2, "off"), (3, 3), (4, "scheduled"), (7, 5)])
def test_tokens_are_those_of_one_rank(nano, ranks, speculation):
    asked = requests(5, tokens=8)
    expected = alone(nano, asked, config(speculation=speculation))
    group = start(nano, EpOptions(ranks, engine=config(speculation=speculation)))
    heard = together(group, asked)
    group.close()
    assert heard == expected
    left = group.left.values()
    assert len(left) == ranks
    assert len({(said.steps, said.collectives) for said in left}) == 1
    first = group.left[0]
    assert first.steps > 5 and first.collectives == 2 * LAYERS * first.steps


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
    from ep_kit import listen

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
        ({"ranks": 2, "engine": config(overlap=True)}, "overlap"),
    ):
        with pytest.raises(ValueError, match=name):
            EpOptions(**bad).resolved(nano.config)
