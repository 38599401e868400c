"""The roles together: one request's way, cancels at every moment, crashes at every moment, drains, resizes."""

import pytest
from roles_kit import Service, expected, image

from orchestrator.roles import Settings
from orchestrator.roles.engine_port import RankDied
from orchestrator.roles.messages import Drain


def test_one_request_goes_its_way():
    service = Service()
    spec = service.request(most=12)
    service.finish(5)
    service.check()
    assert service.answers["r"].tokens == expected(spec)[0]
    service.run(3)
    service.quiet()


def test_many_requests_over_several_workers():
    service = Service(prefill=2, decode=3, encoder=1)
    for number in range(30):
        images = (image("a"), image(f"b{number % 4}")) if number % 3 == 0 else ()
        service.request(f"r{number}", seed=number, most=1 + number % 17, images=images, hit=number % 20)
    service.finish(30)
    service.check()
    assert {a.end.outcome for a in service.answers.values()} == {"finished"}
    used = {name for name, party in service.parties.items() if party.engine and party.core._step}
    assert len(used & {"decode-0", "decode-1", "decode-2"}) == 3
    service.run(3)
    service.quiet()


# A request with an image takes about 0.12 s; every moment of it, and some before and after.
MOMENTS = [number * 0.004 for number in range(40)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_cancel_at_every_moment_frees_everything_within_a_second(moment):
    service = Service(encoder=1)
    service.request(most=12, images=(image("a"),))
    service.run(moment)
    service.cancel()
    answer = service.answers["r"]
    assert answer.end is not None and answer.end.outcome in ("cancelled", "finished")
    service.run(1.0)
    assert service.holders() == set()
    service.request("next")
    service.finish(5)
    service.check()


@pytest.mark.parametrize("who", ["encoder-0", "prefill-0", "decode-0", "router"])
@pytest.mark.parametrize("moment", MOMENTS[::3])
def test_death_and_restart_at_every_moment_loses_nothing(who, moment):
    service = Service(encoder=1)
    service.request(most=12, images=(image("a"),))
    service.run(moment)
    service.crash(who)
    service.run(0.3)
    service.start(who)
    service.finish(30)
    service.check()
    assert service.answers["r"].end.outcome == "finished"
    service.run(8)
    service.quiet()


@pytest.mark.parametrize("who", ["encoder-0", "prefill-0", "decode-0"])
@pytest.mark.parametrize("moment", MOMENTS[::6])
def test_death_for_good_is_taken_over(who, moment):
    service = Service(encoder=2, prefill=2, decode=2)
    service.request(most=12, images=(image("a"),))
    service.run(moment)
    service.crash(who)
    service.finish(30)
    service.check()
    assert service.answers["r"].end.outcome == "finished"
    service.run(8)
    service.quiet()


@pytest.mark.parametrize("moment", MOMENTS[::3])
def test_death_of_the_entry_frees_the_workers(moment):
    service = Service(encoder=1)
    service.request(most=4000, seed=1000, images=(image("a"),), prompt=20)
    service.run(moment)
    service.crash("entry")
    service.run(20)
    service.quiet()


@pytest.mark.parametrize("moment", MOMENTS[::3])
@pytest.mark.parametrize("who", ["prefill-0", "decode-0"])
def test_a_dead_rank_ends_the_group_not_the_request(who, moment):
    service = Service(encoder=1)
    service.request(most=12, images=(image("a"),))
    service.run(moment)
    service.give(who, RankDied(0))
    service.finish(30)
    service.check()
    assert service.answers["r"].end.outcome == "finished"
    service.run(8)
    service.quiet()


def test_drained_decode_worker_moves_its_requests_with_their_state():
    service = Service(decode=2)
    for number in range(6):
        service.request(f"r{number}", seed=1000 + number, most=400)
    service.run(0.5)
    core = service.core("decode-0")
    moving = [key[0] for key in core.rows]
    computed = service.engine("prefill-0").computed
    assert moving
    service.give("decode-0", Drain("decode-0", core.incarnation, 0.5))
    service.run(0.4)
    assert service.core("decode-0") is core  # the grace is not over
    service.run(6)
    assert service.core("decode-0") is None and core.gone
    service.finish(60)
    service.check()
    assert service.engine("prefill-0").computed == computed, "state was moved, not computed again"
    service.run(8)
    service.quiet()


def test_drained_decode_worker_without_a_target_goes_on_until_there_is_one():
    service = Service(decode=1)
    service.request(most=3000, seed=1000)
    service.run(0.5)
    core = service.core("decode-0")
    service.give("decode-0", Drain("decode-0", core.incarnation, 0.5))
    service.run(4)
    assert service.core("decode-0") is core and len(service.answers["r"].tokens) > 500
    service.start("decode-1")
    service.run(3)
    assert service.core("decode-0") is None and service.core("entry").live["r"].worker == "decode-1"
    assert service.engine("prefill-0").computed == 20
    service.finish(60)
    service.check()


def test_drained_decode_worker_hands_over_by_replay_when_no_place_turns_up():
    service = Service(decode=1, settings=Settings(settle=1.01, move=2.0))
    service.request(most=1500, seed=1000)
    service.run(0.5)
    core = service.core("decode-0")
    service.give("decode-0", Drain("decode-0", core.incarnation, 0.5))
    service.run(4)
    assert service.core("decode-0") is None and service.core("entry").live["r"].state == "accepted"
    service.start("decode-1")
    service.finish(60)
    service.check()
    assert service.engine("prefill-0").computed > 400


def test_drained_prefill_worker_finishes_what_it_has():
    service = Service(prefill=1)
    service.request(most=3)
    service.run(0.004)
    core = service.core("prefill-0")
    service.give("prefill-0", Drain("prefill-0", core.incarnation, 60.0))
    service.finish(5)
    service.check()
    service.run(1)
    assert service.core("prefill-0") is None and core.gone


def test_hung_engine_counts_as_dead():
    service = Service(decode=1)
    service.request(most=300, seed=1000)
    service.run(0.2)
    service.engine("decode-0").hangs = True
    service.run(10)
    service.engine("decode-0").hangs = False
    service.finish(60)
    service.check()
    assert service.answers["r"].end.outcome == "finished"
