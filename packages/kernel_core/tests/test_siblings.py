"""Sister packages come from the checkout when it is there, and by name elsewhere."""

import importlib.util
import shutil
import tomllib
from pathlib import Path

HELPER = Path(__file__).parents[1] / "siblings" / "sibling_dependencies.py"


def load(path: Path):
    spec = importlib.util.spec_from_file_location("sibling_dependencies_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_in_the_checkout_a_sister_is_named_by_its_folder():
    wanted = load(HELPER).dynamic_metadata({"requires": ["torch>=2.11"], "siblings": ["kernel_core"]}, {})
    root = HELPER.parents[1]
    assert wanted == {"dependencies": ["torch>=2.11", f"kernel_core @ {root.as_uri()}"]}
    assert (root / "pyproject.toml").is_file()


def test_elsewhere_a_sister_is_named_by_name(tmp_path):
    copy = tmp_path / "a" / "b" / "sibling_dependencies.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(HELPER, copy)
    assert load(copy).dynamic_metadata({"siblings": ["kernel_core"]}, {}) == {"dependencies": ["kernel_core"]}


def test_nothing_asked_nothing_wanted():
    assert load(HELPER).dynamic_metadata({}, {}) == {"dependencies": []}


def test_own_dependencies_name_no_sister():
    project = tomllib.loads((HELPER.parents[1] / "pyproject.toml").read_text())["project"]
    assert [d.split(">")[0] for d in project["dependencies"]] == ["torch", "numpy"]
