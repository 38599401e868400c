"""Parts go ahead while the prompt is still read, what the receiver has is not sent, another process takes them."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.handoff.parts import HandoffRefused, number_of
from orchestrator.engine.request import Ready, SamplingParams, TokenOutput
from orchestrator.engine.scheduler import Step

sys.path.insert(0, str(Path(__file__).parent))
from handoff_kit import poison


def params(seed, **options):
    return SamplingParams(**{"seed": seed, "max_tokens": 20, "ignore_eos": True, "logprobs": 0} | options)


def rest(engine, events=()):
    events = list(events)
    while engine.has_work:
        events += engine.step()
    assert engine.scheduler.blocks.used == engine.scheduler.slots.used == 0
    outputs = [e for e in events if isinstance(e, TokenOutput)]
    return [e.token_id for e in outputs], [e.logprob for e in outputs], sum(isinstance(e, Ready) for e in events)


@pytest.mark.parametrize(("mode", "speculation"), [("alone", "off"), ("in order", 5), ("worker", "scheduled")])
@pytest.mark.parametrize("leaves_at", [1, 4])
def test_prefill_here_and_decode_there(kit, nano, mode, speculation, leaves_at):
    """The first tokens come from one engine, the others from the next; rows are on their way before the prompt ends."""
    options = {"mode": mode, "speculation": speculation, "chunk_tokens": 130}
    first, second = (kit.engine_of(nano, **options) for _ in range(2))
    requests = {str(i): (kit.prompt_of(n, i), params(i)) for i, n in enumerate((1, 121, 300, 600))}
    expected = kit.run(kit.engine_of(nano, speculation="off"), requests)
    door, there = Handoffs(first), Handoffs(second)
    leaving, coming, events, early = {}, {}, [], 0
    for name, (prompt, setting) in requests.items():
        first.add(name, prompt, setting, leaves_at=leaves_at)
        leaving[name] = door.begin(name)
        coming[name] = there.reserve(*leaving[name].take()[0])
    for _ in range(400):
        if not first.has_work:
            break
        events += first.step()
        for name, going in leaving.items():
            going.collect()
            parts = going.take()
            early += len(parts)
            for part in parts:
                coming[name].put(*part)
    assert early >= len(nano.config.kv_source_layer_ids) * (2 + 4) and len(door.due()) == 4
    for name, going in leaving.items():
        going.close()
        for part in going.take():
            coming[name].put(*part)
        assert coming[name].complete and coming[name].commit() == name and going.done()
    assert first.scheduler.blocks.used == first.scheduler.slots.used == 0 and not first.has_work
    while second.has_work:
        events += second.step()
    assert second.scheduler.blocks.used == second.scheduler.slots.used == 0
    for name in requests:
        mine = [e for e in events if e.request_id == name and isinstance(e, TokenOutput)]
        assert [e.token_id for e in mine] == expected[name][0]
        assert [e.logprob for e in mine] == expected[name][1]
        assert sum(isinstance(e, Ready) for e in events if e.request_id == name) == 1


@pytest.mark.parametrize("length", range(119, 129))
def test_drafts_that_reach_into_the_next_block(kit, nano, length):
    """A block whose last rows are those of drafts is not full: the layers' rows go ahead when tokens stand there."""
    prompt, setting = kit.prompt_of(length, 1), params(1, max_tokens=12)
    expected = kit.run(kit.engine_of(nano, speculation="off"), {"r": (prompt, setting)})["r"]
    first, second = (kit.engine_of(nano, speculation=5) for _ in range(2))
    first.add("r", prompt, setting, leaves_at=5)
    leaving, events = Handoffs(first).begin("r"), []
    while not leaving.due:
        events += first.step()
    leaving.close()
    Handoffs(second).take(leaving.take())
    assert leaving.done()
    assert rest(second, events) == (*expected[:2], 1)


def test_room_that_was_not_needed_is_given_back(kit, nano):
    """Offered were the rows of four tokens of output, one came: the second block goes when the request enters."""
    first, second = kit.engine_of(nano), kit.engine_of(nano, speculation="off")
    prompt, setting = kit.prompt_of(126, 1), params(1)
    first.add("r", prompt, setting, leaves_at=4)
    leaving = Handoffs(first).begin("r")
    coming = Handoffs(second).reserve(*leaving.take()[0])
    assert coming.offer.rows > 128 and second.scheduler.blocks.used == 2
    events = first.step()
    leaving.close()
    for part in leaving.take():
        coming.put(*part)
    coming.commit()
    assert leaving.done() and second.scheduler.blocks.used == len(second.find("r").blocks) == 1
    assert rest(second, events)[:2] == kit.run(kit.engine_of(nano), {"r": (prompt, setting)})["r"][:2]


def test_layer_after_layer_in_the_midst_of_a_step(kit, nano, monkeypatch):
    """When the rows of the second source layer are made, those of the first are on their way, and right."""
    engine = kit.engine_of(nano)
    door, prompt = Handoffs(engine), kit.prompt_of(300, 1)
    engine.add("other", kit.prompt_of(5, 2), params(2))
    engine.add("r", prompt, params(1), leaves_at=1)
    leaving = door.begin("r")
    seen = {}
    for layer in nano.config.kv_source_layer_ids:
        attention = nano.attention[layer]

        def watched(x, batch, cache, rope, recorder, layer=layer, write=attention.write_global):
            write(x, batch, cache, rope, recorder)
            taker = threading.Thread(target=lambda: seen.__setitem__(layer, leaving.take()))
            taker.start()
            taker.join()

        monkeypatch.setattr(attention, "write_global", watched)
    engine.step()
    names = {layer: [name for name, _ in parts] for layer, parts in seen.items()}
    assert names == {2: ["offer", "rows/2/0/2"], 4: ["rows/4/0/2"], 6: ["rows/6/0/2"]}
    assert leaving.due
    leaving.close()
    later = leaving.take()
    assert [name for name, _ in later[:3]] == ["rows/2/2/1", "rows/4/2/1", "rows/6/2/1"]
    parts = [part for early in seen.values() for part in early] + later
    assert [number_of(data) for _, data in parts] == list(range(len(parts)))
    second = kit.engine_of(nano)
    Handoffs(second).take(parts)
    leaving.done()
    expected = kit.run(kit.engine_of(nano), {"r": (prompt, params(1))})["r"]
    assert rest(second)[0] == expected[0][1:]
    engine.abort("other")


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_prompt_that_is_parked_on_the_way(kit, nano, at_the_end):
    """Blocks that went ahead stay right; it leaves when it has come back, or as the host copies that it is."""
    prompt, setting = kit.prompt_of(500, 2), params(2)
    expected = kit.run(kit.engine_of(nano), {"r": (prompt, setting)})
    engine, second = kit.engine_of(nano, chunk_tokens=150), kit.engine_of(nano)
    engine.add("r", prompt, setting, leaves_at=3)
    leaving = Handoffs(engine).begin("r")
    parts, events = leaving.take(), [*engine.step(), *engine.step()]
    sequence = engine.find("r")
    step = Step()
    engine.scheduler._park(sequence, step)
    engine._run(step)
    poison(engine)
    leaving.collect()
    parts += leaving.take()
    assert [name for name, _ in parts[-3:]] == ["rows/2/1/1", "rows/4/1/1", "rows/6/1/1"]
    while not (leaving.due or at_the_end):
        events += engine.step()
    leaving.close()
    assert engine.scheduler.blocks.used == (0 if at_the_end else 4)
    Handoffs(second).take(parts + leaving.take())
    assert leaving.done()
    assert rest(second, events) == (*expected["r"][:2], 1)
    assert engine.scheduler.blocks.used == engine.scheduler.slots.used == 0


@pytest.mark.parametrize(
    ("mode", "steps"),
    [("exact", 1), ("exact", 9), ("canonical", 3), ("canonical", 9), ("bounded", 2)],
)
def test_prefix_caches_on_both_sides(kit, nano, mode, steps):
    """Blocks that the receiver has are not sent; what it took over is found by later prompts of its own."""
    options = {"prefix_cache": mode, "chunk_tokens": 130, "speculation": 3}
    first, second, alone = (kit.engine_of(nano, **options) for _ in range(3))
    for engine in (first, second, alone):
        engine.prefix.stride = 256
    shared, prompt = kit.prompt_of(300, 1), kit.prompt_of(300, 1) + kit.prompt_of(250, 2)
    for engine in (first, second, alone):
        kit.run(engine, {"before": (shared, params(9, max_tokens=2))})
    expected = kit.run(alone, {"r": (prompt, params(1, max_tokens=100))})["r"]
    first.add("r", prompt, params(1, max_tokens=100))
    events = []
    for _ in range(steps):
        events += first.step()
    door = Handoffs(first)
    leaving = door.begin("r")
    coming = Handoffs(second).reserve(*leaving.take()[0], share=True)
    assert coming.have == 2
    leaving.skip(coming.have)
    leaving.close()
    parts = leaving.take()
    assert all(not name.startswith("rows") or int(name.split("/")[2]) >= 2 for name, _ in parts)
    for part in parts:
        coming.put(*part)
    coming.commit()
    assert leaving.done()
    assert rest(second, events) == (expected[0], expected[1], 1)
    for engine in (first, second):
        pool = engine.scheduler.blocks
        assert pool.free == pool.capacity
    told = prompt + expected[0]
    found = [len(e.scheduler.blocks.match(e.prefix.chain_of(told).keys)) for e in (second, alone)]
    assert found[0] == found[1] == len(told) // 128
    request = {"again": (told[:600], params(1, max_tokens=5))}
    again, there = kit.run(second, request)["again"], kit.run(alone, request)["again"]
    assert again[3].cached_tokens >= 256  # the windows of the sender's boundaries stayed there
    assert mode == "bounded" or again[:2] == there[:2]


def test_a_receiver_that_has_more_than_the_sender(kit, nano):
    """The sender stops within the prompt, and in a block that the receiver shares with others: refused."""
    prompt = kit.prompt_of(300, 1)
    first, second = (kit.engine_of(nano, prefix_cache="exact", chunk_tokens=140) for _ in range(2))
    kit.run(second, {"before": (prompt, params(1, max_tokens=1))})
    first.add("r", prompt, params(1), leaves_at=1)
    leaving = Handoffs(first).begin("r")
    coming = Handoffs(second).reserve(*leaving.take()[0], share=True)
    assert coming.have == 2
    leaving.skip(2)
    first.step()
    leaving.close()
    with pytest.raises(HandoffRefused, match="rows of 140 tokens, allowed are those of 2 blocks") as error:
        for part in leaving.take():
            coming.put(*part)
    assert error.value.reason == "incomplete"
    coming.cancel()
    assert second.scheduler.blocks.used == 0
    assert leaving.cancel()
    assert len(rest(first)[0]) == 20


def test_salts_and_other_modes_share_nothing(kit, nano):
    prompt = kit.prompt_of(300, 1)
    for mode, salt in (("bounded", ""), ("exact", "someone else")):
        first, second = kit.engine_of(nano, prefix_cache="exact"), kit.engine_of(nano, prefix_cache=mode)
        kit.run(second, {"before": (prompt, params(1, cache_salt=salt))})
        first.add("r", prompt, params(1))
        first.step()
        leaving = Handoffs(first).begin("r")
        coming = Handoffs(second).reserve(*leaving.take()[0], share=True)
        assert coming.have == 0
        with pytest.raises(ValueError, match=r"^blocks: got 3, allowed are 0 to 2"):
            leaving.skip(3)
        coming.cancel()
        leaving.cancel()
        assert len(kit.finish(first)["r"][0]) == 20


def test_a_receiver_that_drafts_and_a_sender_that_does_not(kit, nano):
    """Draft stages' rings that did not come are empty: drafts are worse for a while, tokens are the same."""
    prompt, setting = kit.prompt_of(200, 3), params(3, max_tokens=60)
    expected = kit.run(kit.engine_of(nano, speculation="off"), {"r": (prompt, setting)})["r"]
    engines = [kit.engine_of(nano, speculation=s) for s in ("off", 5)]
    for engine in engines:
        poison(engine)
    events, (one, other) = [], engines
    one.add("r", prompt, setting)
    for turn in range(4):
        source, target = (one, other) if turn % 2 == 0 else (other, one)
        for _ in range(3):
            events += source.step()
        door = Handoffs(source)
        Handoffs(target).take(door.give("r"))
        door.conclude("r", taken=True)
    assert rest(one, events) == (expected[0], expected[1], 1)
    assert other.stats.drafts > 0


RECEIVER = """
import struct, sys, torch
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.request import TokenOutput
from orchestrator.model.load import load_model
torch.set_num_threads(1)
engine = Engine(load_model(sys.argv[1]), None, EngineConfig(num_blocks=12, max_num_seqs=3, speculation=5))
door, parts = Handoffs(engine), []
while (head := sys.stdin.buffer.read(8)):
    name, size = struct.unpack("<II", head)
    parts.append((sys.stdin.buffer.read(name).decode(), sys.stdin.buffer.read(size)))
door.take(parts)
tokens = []
while engine.has_work:
    tokens += [e.token_id for e in engine.step() if isinstance(e, TokenOutput)]
print(*tokens)
"""


def test_another_process_goes_on(kit, nano, nano_path):
    prompt, setting = kit.prompt_of(300, 4), params(4)
    expected = kit.run(kit.engine_of(nano), {"r": (prompt, setting)})["r"][0]
    engine = kit.engine_of(nano)
    engine.add("r", prompt, setting)
    told = [e.token_id for _ in range(3) for e in engine.step() if isinstance(e, TokenOutput)]
    door = Handoffs(engine)
    wire = b"".join(
        struct.pack("<II", len(name.encode()), len(data)) + name.encode() + bytes(data) for name, data in door.give("r")
    )
    command = [sys.executable, "-c", RECEIVER, str(nano_path)]
    there = subprocess.run(command, input=wire, capture_output=True, timeout=120, check=False)
    assert there.returncode == 0, there.stderr.decode()[-2000:]
    assert told + [int(t) for t in there.stdout.split()] == expected
    door.conclude("r", taken=True)


def test_parts_move_without_torch():
    code = "import sys, orchestrator.engine.handoff.parts; assert 'torch' not in sys.modules, 'torch came along'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_a_request_that_ends_before_it_leaves(kit, nano):
    """One token at most, two wanted before it leaves: it ends where it is, and the room there is given back."""
    first, second = kit.engine_of(nano), kit.engine_of(nano)
    first.add("r", kit.prompt_of(30, 1), params(1, max_tokens=1), leaves_at=2)
    leaving = Handoffs(first).begin("r")
    coming = Handoffs(second).reserve(*leaving.take()[0])
    assert second.scheduler.slots.used == 1
    assert len(rest(first)[0]) == 1
    for action in (leaving.collect, leaving.close):
        with pytest.raises(HandoffRefused, match="has ended"):
            action()
    assert not leaving.alive and not leaving.done() and not leaving.cancel()
    coming.cancel()
    coming.cancel()
    assert second.scheduler.slots.used == second.scheduler.blocks.used == 0
    with pytest.raises(HandoffRefused, match="committed or cancelled"):
        coming.commit()
