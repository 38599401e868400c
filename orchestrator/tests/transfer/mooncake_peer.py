"""The other process of a test of Mooncake's links: `send`, `receive PORT`, `memory` or `leave NAME ADDRESS`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from transfer_kit import ID, SLOW, WAIT, parts_of

from orchestrator.transfer import Limits, LinkBroken, MooncakeListener, Receiver, Sender, Times, dial_mooncake
from orchestrator.transfer.mooncake_mover import Mover

LARGE = parts_of([20_000_001] * 3)
KILLED = Times(beat=0.1, silence=2.0, lease=4.0, dial=2.0)  # enough for large parts on a busy machine


def send():
    """Offers large parts for ever."""
    listener = MooncakeListener()
    with Sender(listener, Limits(held=40_000_000), KILLED) as sender:
        offered = sender.offer(ID, 1)
        print(listener.address[1], flush=True)
        while True:
            for part in LARGE:
                offered.put(*part, timeout=WAIT)


def receive(port):
    """Takes parts for ever."""
    receiver = Receiver(functools.partial(dial_mooncake, "127.0.0.1", int(port)), times=SLOW)
    for number, _ in enumerate(receiver.pull(ID, 1).parts(timeout=WAIT)):
        print(number, flush=True)


def memory():
    """Has registered memory: bytes of 0 at the address that it says, of 1 in the chunk before it, and so on."""
    mover = Mover("127.0.0.1", chunk=4096, chunks=8)
    for number in range(8):
        chunk = mover.staging.take(0)
        chunk.view[:] = bytes([number]) * 4096
        if not number:
            print(mover.engine.name, mover.engine.life.hex(), chunk.address, flush=True)
    sys.stdin.readline()


def leave(name, address):
    """Ends while a read goes on that has no end."""
    into = memoryview(bytearray(4096))
    try:
        Mover("127.0.0.1", chunk=4096, chunks=8).read(name, b"", int(address), into, 0.3)
    except LinkBroken as error:
        print("broken", error, flush=True)


if __name__ == "__main__":
    {"send": send, "receive": receive, "memory": memory, "leave": leave}[sys.argv[1]](*sys.argv[2:])
