"""Links that break, targets that die, senders that are full: the state comes whole by another link, or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image as Picture
from port_kit import (
    alone,
    ask,
    begin,
    check_engine,
    check_nothing_is_left,
    compute,
    decode,
    engine_of,
    eventually,
    hand_over,
    load_of,
    port_of,
    prompt_of,
    spec_of,
)

from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.request import SamplingParams, TokenOutput
from orchestrator.model.vision import prepare
from orchestrator.roles.engine_port import Drop, Dropped, Encode, Export, Exported, Loaded, Withdraw
from orchestrator.roles.messages import Image
from orchestrator.service.config import TransferSettings
from orchestrator.service.pixels import pack as pack_pixels
from orchestrator.service.ports.encoder import EncoderPort
from orchestrator.service.ports.streaming import StreamingPort
from orchestrator.service.ports.tickets import unpack
from orchestrator.transfer import Times
from orchestrator.vision import place

PROMPT = prompt_of(700, 1)
PARAMS = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
SPEC = spec_of(PROMPT, PARAMS)


class Cutting:
    """Stands between a target and a source, and breaks each of the first links after so many bytes."""

    def __init__(self, address, after, times):
        self._address, self._after, self.left, self.cut = address, after, times, 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near = self._server.accept()[0]
            except OSError:
                return
            far = socket.create_connection(self._address)
            breaks, self.left = self.left > 0, self.left - 1
            threading.Thread(target=self._pass, args=(near, far, None), daemon=True).start()
            after = self._after if breaks else None
            threading.Thread(target=self._pass, args=(far, near, after), daemon=True).start()

    def _pass(self, one, other, after):
        try:
            while data := one.recv(4096):
                if after is not None and (after := after - len(data)) < 0:
                    self.cut += 1
                    break
                other.sendall(data)
        except OSError:
            pass
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._server.close()


def test_links_that_break_in_the_midst_change_nothing(nano):
    source, target = port_of(nano), port_of(nano)
    try:
        began = begin(source, SPEC)
        ticket = unpack(began.ticket)
        proxy = Cutting((ticket.host, ticket.port), 60_000, 4)
        compute(source, SPEC)
        exported = ask(source, Export("r", 1), Exported)
        from test_streaming_ends import changed

        through = changed(exported, lambda t: msgspec.structs.replace(t, port=proxy.port))
        assert ask(target, load_of(SPEC, through), Loaded) == Loaded("r", 1)
        assert proxy.cut >= 1
        ask(source, Drop("r", 1), Dropped)
        source.do(Withdraw("r", 1))
        assert decode(target, exported) == alone(nano, PROMPT, PARAMS)
        ask(target, Drop("r", 1), Dropped)
        check_nothing_is_left(source, target)
        proxy.close()
    finally:
        source.close()
        target.close()


TARGET = """
import sys, time
sys.path.insert(0, sys.argv[2])
from port_kit import *
import torch
from orchestrator.model.load import load_model
torch.set_num_threads(1)
target = port_of(load_model(sys.argv[1]), kind=sys.argv[3])
target.do(Expect("r", 1, bytes.fromhex(sys.stdin.readline())))
eventually(lambda: target.arrivals.fetches["r", 1].size > 1000)
print("has some", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_target_that_is_killed_leaves_nothing_at_the_source(nano, nano_path, kind):
    source, other = port_of(nano, kind=kind, times=Times(lease=4.0)), port_of(nano, kind=kind)
    command = [sys.executable, "-c", TARGET, str(nano_path), str(Path(__file__).parent), kind]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        began = begin(other, SPEC)  # its lease is long: the child takes a while to start
        child.stdin.write(began.ticket.hex() + "\n")
        child.stdin.flush()
        compute(other, SPEC, upto=260)
        assert child.stdout.readline() == "has some\n"
        os.kill(child.pid, signal.SIGKILL)
        compute(other, SPEC, start=260)
        assert ask(other, Export("r", 1), Exported).manifest is not None
        ask(other, Drop("r", 1), Dropped)
        check_engine(other)
        other.do(Withdraw("r", 1))
        check_nothing_is_left(other)
        assert hand_over(other, source, SPEC) == alone(nano, PROMPT, PARAMS)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        source.close()
        other.close()


def test_nodes_that_differ_go_over_tcp(nano):
    source, target = port_of(nano, kind="auto", node="one"), port_of(nano, kind="auto", node="two")
    try:
        ticket = unpack(begin(source, SPEC).ticket)
        assert ticket.shared and ticket.port and ticket.node == "one"
        assert "dial_tcp" in str(target.doors.dial(ticket)) and "dial_shared" in str(source.doors.dial(ticket))
        ask(source, Drop("r", 1), Dropped)
        assert hand_over(source, target, SPEC) == alone(nano, PROMPT, PARAMS)
        check_nothing_is_left(source, target)
    finally:
        source.close()
        target.close()


def replayed(nano, prompt):
    """Tokens where the end of a prompt is computed once more by another engine."""
    one, other = engine_of(nano), engine_of(nano)
    one.add("r", prompt, PARAMS, leaves_at=0)
    while one.has_work:
        one.step()
    Handoffs(other).take(Handoffs(one).give("r", "replay"))
    events = []
    while other.has_work:
        events += other.step()
    return [event.token_id for event in events if isinstance(event, TokenOutput)]


@pytest.mark.parametrize("length", [30, 400])
def test_ends_of_prompts_may_be_left_to_the_receiver(nano, length):
    prompt = prompt_of(length, 3)
    spec = spec_of(prompt, PARAMS)
    times = Times(lease=60.0, silence=20.0)
    source, target = (
        StreamingPort(
            engine_of(nano), host="127.0.0.1", node="n", settings=TransferSettings("tcp"), replay_tail=True, times=times
        )
        for _ in range(2)
    )
    try:
        assert hand_over(source, target, spec)[0] == replayed(nano, prompt)
        check_nothing_is_left(source, target)
    finally:
        source.close()
        target.close()


def test_an_image_from_its_pixels_to_the_answer(seeing, seeing_path):
    """Encoder, prefill and decode apart, as the roles have it done."""
    config, mark = seeing.config, seeing.config.image_token_id
    pixels = np.random.default_rng(5).integers(0, 256, (80, 100, 3), dtype=np.uint8)
    image = prepare(Picture.fromarray(pixels), config.vision)
    prompt, placed = place([5, 6, 7, mark, 8, 9], [image], mark)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    encoder = EncoderPort(seeing_path, lambda entry, digest: encoder.pixels(digest, pack_pixels(image)))
    source, target = port_of(seeing, kind="shared"), port_of(seeing, kind="shared")
    try:
        digest = image.digest.hex()
        encoder.do(Encode(Image(digest, image.geometry.patches), "entry"))
        came = []

        def done():
            came.extend(encoder.answers())
            return came

        eventually(done)
        spec = spec_of(prompt, params, tuple(placed))
        answer = hand_over(source, target, spec, embeddings=((digest, came[0].payload),))
        assert answer == alone(seeing, prompt, params, images=placed)
        check_nothing_is_left(source, target)
        assert source.engine.images.counters.patches == target.engine.images.counters.patches == 0
    finally:
        encoder.close()
        source.close()
        target.close()
