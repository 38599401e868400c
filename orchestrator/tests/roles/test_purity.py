"""The cores are state machines: no I/O, no clock, no randomness, no tensors; the same events give the same actions."""

import ast
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from roles_kit import Service, unreliable

import orchestrator.roles as roles

SHELLS = {"local.py", "shared_engine.py", "handoff_port.py"}
ALLOWED = {"__future__", "collections", "dataclasses", "typing", "zlib", "msgspec", "kernel_core", "orchestrator"}


def modules():
    folder = Path(roles.__file__).parent
    return [path for path in sorted(folder.rglob("*.py")) if path.name not in SHELLS]


def test_cores_import_nothing_that_acts():
    assert len(modules()) > 30
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top, _, rest = name.partition(".")
                assert top in ALLOWED, f"{path.name} imports {name}"
                assert top != "orchestrator" or rest.split(".")[0] in ("roles", "balance"), f"{path.name}: {name}"


def test_files_are_short():
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 350 for path in modules())


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**20))
def test_the_same_events_give_the_same_actions(seed):
    def run():
        service = Service(prefill=2, decode=2, fate=unreliable(seed, 0.1, 0.2, 0.2))
        for number in range(4):
            service.request(f"r{number}", seed=seed + number, most=20)
        service.run(0.3)
        service.crash("decode-0")
        service.run(1.0)
        service.start("decode-0")
        service.run(5.0)
        return service.sent

    assert run() == run()
