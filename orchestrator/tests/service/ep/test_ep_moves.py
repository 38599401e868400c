"""States that leave a group and come back, and requests that are dropped at every point."""

from __future__ import annotations

from dataclasses import replace

import pytest
from service_kit_ep import alone, empty, group, requests, single, through

from orchestrator.roles.engine_port import (
    Began,
    Begin,
    DecodeDone,
    Drop,
    Dropped,
    Export,
    Exported,
    Load,
    Loaded,
    PrefillDone,
    Rename,
    RunDecode,
    Thaw,
    Withdraw,
)
from orchestrator.service.process.build import settings_of

COUNT = 3


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "overlapped"])
def pair(folder, tmp_path_factory, request):
    """Steps that overlap are what a GPU has by default."""

    def settings(engine):
        return replace(settings_of(engine), overlap=request.param)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestrator.service.ep.options.settings_of", settings)
        made = group(folder, tmp_path_factory.mktemp("service"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(folder):
    return alone(folder, requests(COUNT))


@pytest.fixture(scope="module")
def one(folder):
    return single(folder)


def test_to_and_fro(pair, one, expected):
    """Begun by one engine, decoded by the group, by the engine, by the group: every token once."""
    specs = requests(COUNT)
    states = one.prefill(specs)
    heard = {key: list(state.manifest.output) for key, state in states.items()}
    left, source, gone = sorted(specs), None, []
    for here in (pair, one, pair, one, pair):
        here.load(specs, {key: states[key] for key in left})
        if source is not None:
            source.drop(gone)  # what was exported is offered until then
        ended = here.decode(left, heard, steps=2)
        for key in sorted(set(left) - set(ended)):
            here.do(Export(*key))
            (exported,) = here.wait(Exported)
            if exported.manifest is None:  # the group was ahead of what it told, and is at its end
                ended |= here.decode([key], heard)
            else:
                states[key], heard[key] = exported, list(exported.manifest.output)
        here.drop(sorted(ended))
        source, gone = here, [key for key in left if key not in ended]
        left = gone
    one.load(specs, {key: states[key] for key in left})
    pair.drop(gone)
    one.decode(left, heard)
    one.drop(left)
    assert heard == expected
    empty(pair)


def test_an_export_that_comes_to_nothing(pair, one, expected):
    specs = requests(COUNT)
    states = one.prefill(specs)
    heard = {key: list(state.manifest.output) for key, state in states.items()}
    pair.load(specs, states)
    pair.do(RunDecode(500, tuple(sorted(specs)[:1])))  # of one alone; the group steps all
    (done,) = pair.wait(DecodeDone)
    for output in done.outputs:
        heard[output.request, output.epoch] += output.tokens
    for key in specs:
        pair.do(Export(*key))
        (exported,) = pair.wait(Exported)
        if exported.manifest is not None:
            heard[key] = list(exported.manifest.output)
    pair.do(*(Thaw(*key) for key in specs))
    pair.decode(specs, heard)
    pair.drop(specs)
    assert heard == expected
    empty(pair)


def test_another_epoch(pair, one, expected):
    """A landed request is renamed, and decoded under its new key."""
    specs = requests(1)
    (key,) = specs
    states = one.prefill(specs)
    pair.load(specs, states)
    new = (key[0], 4)
    pair.do(Rename(*key, 4))
    heard = {new: list(states[key].manifest.output)}
    pair.decode([new], heard)
    pair.drop([new])
    assert heard[new] == expected[key]
    empty(pair)


def test_output_so_far_is_computed_as_prompt(pair, one, expected):
    specs = requests(COUNT)
    outputs = {key: tuple(tokens[: 2 + i]) for i, (key, tokens) in enumerate(expected.items())}
    assert through(pair, one, specs, outputs) == expected
    empty(pair)


PROMPTS = {"begun": Began, "asked": PrefillDone, "midway": None, "exported": None}
STATES = {"expected": None, "loaded": Loaded, "decoding": DecodeDone, "frozen": Exported}


@pytest.mark.parametrize(("point", "owed"), (PROMPTS | STATES).items())
def test_a_drop_leaves_nothing(pair, one, expected, point, owed):
    specs = requests(COUNT)
    keys = list(specs)
    if point in PROMPTS:
        pair.do(*(Begin(*key, spec) for key, spec in specs.items()))
        if point != "begun":
            pair.wait(Began, COUNT)
            pair.run_prefill(specs, upto=64 if point == "midway" else None)
        if point in ("midway", "exported"):
            pair.wait(PrefillDone)
        if point == "exported":
            pair.export(keys)
    else:
        states = one.prefill(specs, expecting=pair)
        if point != "expected":
            pair.do(*(Load(*key, specs[key], state.manifest, state.parts) for key, state in states.items()))
        if point in ("decoding", "frozen"):
            pair.wait(Loaded, COUNT)
            pair.do(RunDecode(900, tuple(keys)))
        if point == "frozen":
            pair.wait(DecodeDone)
            pair.do(*(Export(*key) for key in keys))
    pair.do(*(Drop(*key) for key in keys))
    if point == "exported":
        pair.do(*(Withdraw(*key) for key in keys))
    pair.wait(Dropped, COUNT)
    if owed in (Began, PrefillDone, DecodeDone):
        pair.wait(owed, 1 if owed is not Began else COUNT)
    pair.sift(owed)  # of loads and exports, those that were answered before
    one.do(*(Withdraw(*key) for key in keys))
    pair.drop(keys)  # unknown ones are no error
    assert not pair.quiet()
    empty(pair)
    assert through(pair, one, requests(1))["r0", 1] == expected["r0", 1]
