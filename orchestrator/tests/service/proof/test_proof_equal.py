"""Encoder, prefill and decode in processes of their own give what one process gives, token for token."""

from __future__ import annotations

from proof_kit import check, counted, every_kind, some


def test_every_kind_in_every_protocol(reference, park):
    """Greedy, sampled, long and shared prompts, schemas, tools, images, stop strings; log-probabilities too."""
    got = check(reference, park, every_kind(31))
    assert all(answer.finish for answer in got.values())
    assert any(answer.tokens for answer in got.values())
    park.wait_idle()


def test_states_came_from_prefill_workers(reference, park):
    """The answers above would also be right if a decode worker had computed everything itself."""
    before = counted(park)
    check(reference, park, some(32, 6, kinds=("long",)))
    park.wait(lambda: counted(park)["decode handoffs in"] >= before["decode handoffs in"] + 6, 30, "to count states")
    after = counted(park)
    assert after["prefill handoffs out"] >= before["prefill handoffs out"] + 6
    assert after["prefill prompt tokens"] > before["prefill prompt tokens"]
    assert after["decode prompt tokens"] == before["decode prompt tokens"]


def test_the_same_prompts_again_hit_a_cache(reference, park):
    wanted = some(33, 3, kinds=("long",), long=800)
    check(reference, park, wanted)
    again = check(reference, park, wanted)
    assert all(answer.cached > 0 for answer in again.values())
