"""How fast `orchestrator.transfer` moves parts between two processes of this machine, beside a copy and a plain socket.

A sender's process and a receiver's, over each kind of link. **latency**: one part at a time, from the sender's `put` to
the receiver's `take`, checksums of both sides in it. **rate**: many parts, one behind the other.
The best of several rounds counts, so that somebody else's load does not. Prints two tables, and writes JSON.

    python orchestrator/bench/transfer.py --rounds 10 --json figures.json
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestrator import transfer
from orchestrator.transfer import Limits, Receiver, Sender, Times

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "3 MB": 3_000_000, "32 MiB": 32 * MIB, "256 MiB": 256 * MIB}
"""256 MiB goes as four parts: no part may be larger than `Limits.part`."""
KINDS = ("copy", "socket", "local", "shared", "tcp", "mooncake")
WHAT = {"copy": "copy in memory", "socket": "plain socket", "local": "in-process", "shared": "shared memory",
        "tcp": "TCP", "mooncake": "Mooncake (TCP)"}  # fmt: skip
LIMITS, TIMES, WAIT = Limits(held=256 * MIB), Times(silence=20.0, lease=60.0, dial=20.0), 60.0


def parts_of(size: int) -> int:
    return -(-size // LIMITS.part)


# The sender's process


def serve(sender: Sender, orders: Iterator[str], ready: Callable[[], None]) -> None:
    """Each order is a handoff, a size, how many of them, and whether each waits until the one before is taken."""
    for order in orders:
        handoff, size, count, alone = order.split()
        pieces = parts_of(int(size))
        data = os.urandom(int(size) // pieces)
        offered = sender.offer(bytes.fromhex(handoff), 1)
        ready()
        for _ in range(int(count)):
            start = str(time.monotonic_ns())
            for _ in range(pieces):
                offered.put(start, data, timeout=WAIT)
            with offered.changed:
                offered.changed.wait_for(lambda: alone == "0" or not offered.held, WAIT)  # noqa: B023
        offered.finish()
        offered.wait(timeout=WAIT)


def serve_socket(orders: Iterator[str], say: Callable[[str], None]) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    say(str(server.getsockname()[1]))
    connected = server.accept()[0]
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for order in orders:
        _, size, count, alone = order.split()
        data = os.urandom(int(size))
        say("ready")
        for _ in range(int(count)):
            connected.sendall(time.monotonic_ns().to_bytes(8, "little"))
            connected.sendall(data)
            if alone == "1":
                connected.recv(1)


def listen(kind: str) -> Any:
    if kind == "shared":
        return transfer.SharedListener()
    return transfer.TcpListener() if kind == "tcp" else transfer.MooncakeListener()


def serve_process(kind: str) -> None:
    def say(words: str) -> None:
        print(words, flush=True)

    if kind == "socket":
        return serve_socket(iter(sys.stdin), say)
    listener = listen(kind)
    with Sender(listener, LIMITS, TIMES) as sender:
        say(listener.address if kind == "shared" else str(listener.address[1]))
        serve(sender, iter(sys.stdin), functools.partial(say, "ready"))


# The receiver's

Run = Callable[[int, int, bool], list[tuple[int, int]]]
"""(size, count, alone) -> when each was put and when all of it was taken, in nanoseconds."""


def copied(size: int, count: int, alone: bool) -> list[tuple[int, int]]:
    data, into, times = memoryview(os.urandom(size)), memoryview(bytearray(size)), []
    for _ in range(count):
        start = time.monotonic_ns()
        into[:] = data
        times.append((start, time.monotonic_ns()))
    return times


def pulled(receiver: Receiver, begin: Callable[[str], None], size: int, count: int, alone: bool) -> list[Any]:
    handoff, times = os.urandom(16), []
    begin(f"{handoff.hex()} {size} {count} {int(alone)}")
    with receiver.pull(handoff, 1) as pull:
        for _ in range(count):
            for _ in range(parts_of(size)):
                part = pull.take(timeout=WAIT)
            assert part is not None
            times.append((int(part[0]), time.monotonic_ns()))
        assert pull.take(timeout=WAIT) is None
        pull.done(timeout=WAIT)
    return times


def received(connected: socket.socket, begin: Callable[[str], None], size: int, count: int, alone: bool) -> list[Any]:
    begin(f"00 {size} {count} {int(alone)}")
    into, head, times = bytearray(size), bytearray(8), []
    for _ in range(count):
        for each in (head, into):
            view = memoryview(each)
            while view:
                view = view[connected.recv_into(view) :]
        times.append((int.from_bytes(head, "little"), time.monotonic_ns()))
        if alone:
            connected.sendall(b"!")
    return times


@contextlib.contextmanager
def runner(kind: str) -> Iterator[Run]:
    if kind == "copy":
        yield copied
    elif kind == "local":
        with local() as run:
            yield run
    else:
        pipe = subprocess.PIPE
        child = subprocess.Popen([sys.executable, __file__, "--serve", kind], stdin=pipe, stdout=pipe, text=True)
        assert child.stdin is not None and child.stdout is not None
        try:
            address = child.stdout.readline().strip()

            def begin(order: str) -> None:
                print(order, file=child.stdin, flush=True)
                if not child.stdout or child.stdout.readline() != "ready\n":
                    raise RuntimeError(f"the sender over {kind} has ended")

            if kind == "socket":
                with socket.create_connection(("127.0.0.1", int(address))) as connected:
                    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    yield functools.partial(received, connected, begin)
            else:
                way = (address,) if kind == "shared" else ("127.0.0.1", int(address))
                dial = functools.partial(getattr(transfer, f"dial_{kind}"), *way)
                yield functools.partial(pulled, Receiver(dial, LIMITS, TIMES), begin)
        finally:
            child.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            child.kill()
            child.wait()


@contextlib.contextmanager
def local() -> Iterator[Run]:
    import threading

    listener = transfer.LocalListener()
    with Sender(listener, LIMITS, TIMES) as sender:

        def begin(order: str) -> None:
            there = threading.Event()
            threading.Thread(target=serve, args=(sender, iter([order]), there.set), daemon=True).start()
            there.wait(WAIT)

        yield functools.partial(pulled, Receiver(listener.dial, LIMITS, TIMES), begin)


def measure(kind: str, sizes: dict[str, int], most: int, found: dict[tuple[str, int], dict[str, Any]]) -> None:
    """One round: latency in microseconds (best of all rounds, and the best median of one), rate in GB/s (best)."""
    with runner(kind) as run:
        run(MIB, 2, True)
        for size in sizes.values():
            count = max(1, min(300, most // size))
            alone = sorted((end - start) / 1e3 for start, end in run(size, count, True))
            times = run(size, count, False)
            rate, load = size * count / (times[-1][1] - times[0][0]), os.getloadavg()[0]
            row = found.setdefault((kind, size), {"kind": kind, "size": size, "count": count, "rounds": []})
            row["rounds"].append(
                {"latency_us": alone[0], "median_us": alone[len(alone) // 2], "rate": rate, "load": load}
            )
            row["latency_us"] = min(each["latency_us"] for each in row["rounds"])
            row["median_us"] = min(each["median_us"] for each in row["rounds"])
            row["rate_gb_s"] = max(each["rate"] for each in row["rounds"])


def table(rows: list[dict[str, Any]], kinds: list[str], what: str, form: Callable[[float], str]) -> str:
    sizes = {row["size"] for row in rows}
    lines = ["| parts | " + " | ".join(WHAT[kind] for kind in kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for name, size in SIZES.items():
        if size in sizes:
            found = {row["kind"]: form(row[what]) for row in rows if row["size"] == size}
            lines.append(f"| {name} | " + " | ".join(found.get(kind, "-") for kind in kinds) + " |")
    return "\n".join(lines)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--rounds", type=int, default=5, help="of which the best counts; an interrupt ends them (default 5)"
    )
    parser.add_argument("--most", type=int, default=128, help="MiB of one run, one part at least (default 128)")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve_process(options.serve)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    sizes = {name: SIZES[name] for name in options.sizes}
    rounds = 0
    with contextlib.suppress(KeyboardInterrupt):
        while rounds < options.rounds:
            for kind in options.kinds:
                measure(kind, sizes, options.most * MIB, found)
            rounds += 1
            print(f"round {rounds} of {options.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    rows = list(found.values())
    loads = [each["load"] for row in rows for each in row["rounds"]]
    machine = {"processor": processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    print(f"{machine['processor']}, {machine['cores']} cores, loopback, best of {rounds} rounds,")
    print(f"load {min(loads):.1f} to {max(loads):.1f}\n")
    print("Rate, GB/s:\n\n" + table(rows, options.kinds, "rate_gb_s", "{:.2f}".format))
    print("\nLatency, ms:\n\n" + table(rows, options.kinds, "latency_us", lambda us: f"{us / 1000:.2f}"))
    if options.json:
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        all_of_it = {"machine": machine, "date": date, "rows": rows}
        options.json.write_text(json.dumps(all_of_it, indent=1) + "\n")


if __name__ == "__main__":
    main()
