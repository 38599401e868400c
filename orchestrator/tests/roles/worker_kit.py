"""Workers in the state that a test begins with."""

from roles_kit import image

from orchestrator.roles import Decode, DecodeOptions, Prefill, PrefillOptions, Settings
from orchestrator.roles import messages as m
from orchestrator.roles.engine_port import (
    Began,
    DecodeDone,
    DecodeOutput,
    Exported,
    Loaded,
    PrefillDone,
)
from orchestrator.roles.state_parts import KINDS, Manifest, part_of

SPEC = m.RequestSpec(tuple(range(300)), 50, hit=40)
PARTS = tuple(f"{kind} rows".encode() for kind in KINDS)


def manifest(output=(7,), **more):
    return Manifest("toy", 300 + max(0, len(output) - 1), output, False, tuple(map(part_of, KINDS, PARTS)), **more)


def beats(core, start, seconds):
    actions, at = [], start
    while at < start + seconds:
        at += 0.5
        actions += core.step(m.Tick(), at)
    return actions


def assign(epoch=1, **more):
    options = {"target": "d", "target_incarnation": 1000} | more
    return m.AssignPrefill("r", epoch, 1000, "entry", SPEC, (), **options)


def prefill_in(state):
    core = Prefill("p", 1, PrefillOptions(most=3), Settings())
    core.step(m.Start(), 0.0)
    embeddings = (m.Embedding("x", "e", 1000),) if state == "fetching" else ()
    core.step(assign(embeddings=embeddings), 0.0)
    if state in ("computing", "exporting", "offering"):
        core.step(Began("r", 1, 40), 0.0)
    if state in ("exporting", "offering"):
        core.step(PrefillDone(1, 0.1), 0.0)
    if state == "offering":
        core.step(Exported("r", 1, manifest(), PARTS), 0.0)
    assert core.jobs["r", 1].state == state
    return core


JOB_STATES = ["fetching", "beginning", "computing", "exporting", "offering"]


def reserve(epoch=1, request="r", need=400, **more):
    options = {"source": "p", "source_incarnation": 1000} | more
    return m.Reserve(request, epoch, 1000, "entry", SPEC, (), need=need, **options)


def decode_in(state):
    core = Decode("d", DecodeOptions(1000, 3, "toy"), 1, Settings())
    core.step(m.Start(), 0.0)
    core.step(reserve(moving=state == "landed"), 0.0)
    if state == "reserved":
        return core
    core.step(m.Offer("r", 1, "p", 1000, 1000, manifest()), 0.0)
    if state != "pulling":
        for number, payload in enumerate(PARTS):
            core.step(m.Piece("r", 1, 1000, number, payload), 0.0)
    if state not in ("pulling", "loading"):
        core.step(Loaded("r", 1), 0.0)
    if state == "moving":
        core.step(m.Drain("d", 1000, 0.0), 0.0)
        core.step(m.MoveTo("r", 1, 1, "d2", 1000), 0.1)
    if state == "telling":
        core.step(DecodeDone(1, (DecodeOutput("r", 1, (8,), "stop"),)), 0.0)
    assert core.rows["r", 1].state == state
    return core


ROW_STATES = ["reserved", "pulling", "loading", "landed", "decoding", "moving", "telling"]


def ask(epoch=1, name="x", request="r", patches=10):
    return m.AssignImage(request, epoch, 1000, "entry", image(name, patches))
