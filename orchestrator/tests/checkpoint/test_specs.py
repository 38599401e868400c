"""The derived tensor table, held to the published checkpoint."""

from __future__ import annotations

import importlib.util
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.model.checkpoint.layout import header, place
from orchestrator.model.checkpoint.specs import parameter_count, tensor_specs
from orchestrator.model.presets import v41_flash, v41_mini, v41_nano

REPOSITORY = Path(__file__).resolve().parents[3]

# Bytes of the published shards by number.
SHARD_BYTES = {1: 970533624, 2: 1323858272, 43: 1323837624, 44: 2652728736, 45: 2573998176, 46: 2706402896}
SHARD_BYTES |= {layer + 3: 7389759032 if layer < 10 else 7389761368 for layer in range(40)}
SHARD_BYTES |= {5: 7405953784, 11: 7405953784, 17: 7405956128, 23: 7400713088}
SHARD_BYTES |= dict.fromkeys((27, 31, 35, 39), 7395337384)
SHARD_BYTES |= {47: 101535150936, 48: 101537926640}


def test_flash_totals():
    specs = tensor_specs(v41_flash())
    assert len(specs) == 96085
    assert sum(spec.nbytes for spec in specs.values()) == 510286023000
    counts, sizes = Counter(), Counter()
    for spec in specs.values():
        counts[spec.dtype] += 1
        sizes[spec.dtype] += spec.nbytes
    assert counts == {"BF16": 520, "F32": 387, "F8_E4M3": 357, "F8_E8M0": 47589, "I8": 47232}
    assert sizes == {
        "BF16": 3952883712,
        "F32": 169229128,
        "F8_E4M3": 204015223296,
        "F8_E8M0": 23563015184,
        "I8": 278585671680,
    }
    assert parameter_count(v41_flash()) == 763205315794


def test_flash_shards():
    """Names, dtypes, shapes and placement together give the size of every published file."""
    specs = tensor_specs(v41_flash())
    files = list(place(specs, "layers").values())
    assert len(files) == 48
    sizes = {}
    for number, names in enumerate(files, 1):
        head, begins = header(specs, names)
        assert begins[names[0]] == len(head)
        sizes[number] = len(head) + sum(specs[name].nbytes for name in names)
    assert sizes == SHARD_BYTES


def test_tensors_per_layer():
    counts = Counter(re.match(r"(layers|mtp)\.\d+", name)[0] for name in tensor_specs(v41_flash()) if name[0] in "lm")
    special = {1: 2340, 2: 2342, 8: 2342, 14: 2348, 20: 2341, 24: 2337, 28: 2337, 32: 2337, 36: 2337}
    assert [counts[f"layers.{layer}"] for layer in range(40)] == [special.get(layer, 2334) for layer in range(40)]
    assert [counts[f"mtp.{stage}"] for stage in range(3)] == [801, 798, 802]


def test_against_the_table_of_the_specification():
    places = [REPOSITORY / "shared", REPOSITORY.parent / "shared"]
    script = next((p / "spec/checkpoint_specs.py" for p in places if (p / "spec/checkpoint_specs.py").is_file()), None)
    if script is None:
        pytest.skip("the specification (shared/spec/checkpoint_specs.py) is not beside this checkout")
    module_spec = importlib.util.spec_from_file_location("checkpoint_specs", script)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    for config in (v41_flash(), v41_mini(vision=True), v41_nano(vision=True), v41_nano(stages=1, vision=True)):
        theirs = module.specs(config.to_hf())
        ours = {name: tuple(spec) for name, spec in tensor_specs(config).items()}
        assert ours == theirs
        payload = sum(module.SIZE[dtype] * math.prod(shape) for dtype, shape in theirs.values())
        assert payload == sum(spec.nbytes for spec in tensor_specs(config).values())


def test_parameters_of_the_small_models():
    assert parameter_count(v41_mini()) == 29_981_074
    assert parameter_count(v41_nano()) == 3_389_806
    assert parameter_count(v41_nano(stages=1)) == 3_117_546
    assert parameter_count(v41_mini(vision=True)) == 30_315_794
    assert parameter_count(v41_nano(vision=True)) == 3_588_718
    assert parameter_count(v41_nano(stages=1, vision=True)) == 3_316_458
    assert parameter_count(v41_mini(vision=True), vision=False) == 29_981_074


def test_without_draft_stages():
    specs = tensor_specs(v41_nano(stages=0))
    assert not any(name.startswith("mtp.") for name in specs)
