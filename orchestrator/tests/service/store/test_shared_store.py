"""Two worker processes that share a store: what one has computed the other finds, with the tokens of a cold run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from service_kit_store import prompt_of, same, until

KINDS = ["embedded", "directory", "mooncake"]


@pytest.mark.parametrize(("kind", "mode"), [
    *[(kind, "exact") for kind in KINDS], ("embedded", "canonical"), ("embedded", "bounded"),
])  # fmt: skip
def test_a_worker_finds_what_another_has_computed(start, configured, machines, cold, kind, mode) -> None:
    """Prompts and answers. What a bounded replay gives may differ from a cold run, so there only the hit is asked."""
    config, (one, two) = configured(kind, mode), machines(kind)
    first, second = start(config, one), start(config, two)
    first.up(), second.up()
    prompt, other = prompt_of(600, 1), prompt_of(900, 2)
    spoken = first.run(prompt, 60)
    longer = prompt + spoken["tokens"] + prompt_of(40, 3)
    computed = first.run(other)
    assert spoken["cached"] == computed["cached"] == 0 and same(computed, cold(other, 4, mode))
    assert first.ask(flush=60)
    second.stored(longer, 5), second.stored(other, 6)
    for tokens, hit in ((longer, 640), (other, 768)):
        found = second.run(tokens)
        assert found["cached"] == hit
        assert mode == "bounded" or same(found, cold(tokens, 4, mode))
    numbers = second.numbers()
    assert numbers["store_up"] == 1 and numbers["store_reconnects"] == 0
    assert mode != "exact" or numbers["store_windows_brought"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_write_the_same_and_other_prefixes_at_once(start, configured, machines, cold, kind) -> None:
    config, (one, two) = configured(kind), machines(kind)
    first, second = start(config, one), start(config, two)
    first.up(), second.up()
    shared, tails = prompt_of(520, 4), [prompt_of(300, 5), prompt_of(300, 6)]
    for worker, tail in zip((first, second), tails, strict=True):
        worker.send(run=shared + tail)
    computed = [first.answer(), second.answer()]
    expected = [cold(shared + tail) for tail in tails]
    assert all(map(same, computed, expected))
    assert first.ask(flush=60) and second.ask(flush=60)
    for worker, tail, before in ((first, tails[1], expected[1]), (second, tails[0], expected[0])):
        worker.stored(shared + tail, 6)
        found = worker.run(shared + tail)
        assert found["cached"] == 768 and same(found, before)


def test_the_process_outlives_its_starter_and_ends_with_the_last_worker(start, configured, machines, tmp_path) -> None:
    config, (one, _) = configured("embedded"), machines("embedded")
    first = start(config, one).up()
    second = start(config, one).up()
    prompt = prompt_of(600, 7)
    computed, io = first.run(prompt), first.io_pid()
    assert first.ask(flush=60)
    first.kill()
    found = second.run(prompt)
    assert found["cached"] == 512 and same(found, computed)
    assert second.io_pid() == io and second.numbers()["store_reconnects"] == 0
    home = Path(second.ask(home=1))
    second.kill()
    until(lambda: not Path(f"/proc/{io}").exists(), "the I/O process outlives its workers")
    assert not home.exists()
    third = start(config, one).up()  # the next service with this folder
    third.stored(prompt, 4)
    assert same(third.run(prompt), computed)


def test_what_was_left_in_memory_goes_with_the_next_start(start, configured, machines, tmp_path) -> None:
    from orchestrator.service.store.io_process import Places

    config, (one, _) = configured("embedded"), machines("embedded")
    gone = Places(tmp_path / "gone")
    gone.make()
    gone.lock.touch()
    gone.arena.write_bytes(b"x" * 4096)
    worker = start(config, one).up()
    assert worker.numbers()["store_up"] == 1
    assert gone.home.exists() == (gone.home.parent != Path("/dev/shm"))


def test_settings_that_cannot_be_are_named(nano_path, tmp_path) -> None:
    from orchestrator.service.config import StoreSettings
    from orchestrator.service.store.shared import check_store

    for settings, words in (
        (StoreSettings(kind="embedded"), r"store\.folder: got , allowed is a folder"),
        (StoreSettings(kind="mooncake"), r'store\.options: got {}, allowed is "master"'),
        (StoreSettings(kind="directory", folder="x", capacity_gb=0), r"store\.capacity_gb: got 0"),
        (StoreSettings(kind="directory", folder="x", host_blocks=4), r"store\.host_blocks: got 4"),
    ):
        with pytest.raises(ValueError, match=words):
            check_store(settings)


def test_a_folder_that_cannot_be_used_is_said_and_the_worker_goes_on(start, configured, machines, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    config = configured("embedded", folder=str(tmp_path / "file" / "below"))
    worker = start(config, tmp_path / "one", patience={"start_s": 5.0}).up()
    assert worker.run(prompt_of(300, 8))["reason"] == "length"
    assert worker.numbers()["store_up"] == 0
    until(lambda: "the I/O process ended with status 1" in worker.words(), "nobody said why")
    os.remove(tmp_path / "file")
    until(lambda: worker.numbers()["store_up"] == 1, "the store was not tried again")
