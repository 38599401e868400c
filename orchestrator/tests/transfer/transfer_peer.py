"""The other process of a test: `transfer_peer.py send KIND` or `transfer_peer.py receive KIND ADDRESS...`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from transfer_kit import ID, QUICK, WAIT, dial_of, listen, parts_of

from orchestrator.transfer import Receiver, Sender

SIZES = [0, 1, 70_001, 4096, 300_000]
"""Parts of a sender; it finishes only when a line comes in."""


class Address:
    def __init__(self, words):
        self.address = words[0] if len(words) == 1 else (words[0], int(words[1]))


def main(what, kind, *address):
    if what == "send":
        listener = listen(kind, 65536)
        with Sender(listener, times=QUICK) as sender:
            offered = sender.offer(ID, 1)
            for name, data in parts_of(SIZES):
                offered.put(name, data, timeout=WAIT)
            print(*([listener.address] if kind == "shared" else listener.address), flush=True)
            sys.stdin.readline()
            offered.finish()
            offered.wait(timeout=WAIT)
            print("concluded", flush=True)
    else:
        pull = Receiver(dial_of(kind, Address(address)), times=QUICK).pull(ID, 1)
        for _ in SIZES:
            pull.take(timeout=WAIT)
        print("taken", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
