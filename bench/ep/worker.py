"""A process of `fathom bench ep`: rank, ranks, where to meet, and what to do."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys

import torch

from bench.ep.group import Group

PARTS = ("faults", "traffic", "moves", "experts")
LOADS = ("zero", "hot", "one")


def run(group: Group, parts: list[str], quick: bool) -> None:
    from bench.ep import experts, faults, traffic
    from bench.ep.rows import Ledger

    if "faults" in parts:
        faults.delayed(group, 50 if quick else 1000)
        faults.stopped(group)
    if set(parts) == {"faults"}:
        return
    ledger = Ledger(group)
    group.tell(say=f"a GPU copies {ledger.link_gbps:.0f} GB/s to a peer's memory while all do")
    if "traffic" in parts:
        traffic.barriers(group, ledger)
        sizes = (8, 1024) if quick else traffic.DECODE + traffic.PREFILL
        for tokens in sizes:
            for form in traffic.FORMATS:
                traffic.measure(group, ledger, tokens, form)
        for load in LOADS:
            for tokens in (8,) if quick else (128, 4096):
                traffic.measure(group, ledger, tokens, "fp8", load)  # type: ignore[arg-type]
    if "moves" in parts:
        one = 3 * experts.HIDDEN * experts.INTER * 17 // 32  # of packed MXFP4: 4.25 bits a value
        traffic.moves(group, ledger, one, *((1, 2) if quick else (experts.EACH, 80)))
    if "experts" in parts:
        layer = experts.Layer(group)
        for tokens in (8,) if quick else experts.TOKENS:
            experts.measure(group, ledger, layer, tokens)
        for load in LOADS:
            experts.measure(group, ledger, layer, 8 if quick else 64, load)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("meet")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(argv)
    faulthandler.enable()
    torch.set_num_threads(max(1, min(8, (os.cpu_count() or 1) // given.world)))  # ranks share the host's cores
    group = Group(given.rank, given.world, given.meet)
    run(group, given.parts.split(","), given.quick)
    group.close()


if __name__ == "__main__":
    main(sys.argv[1:])
