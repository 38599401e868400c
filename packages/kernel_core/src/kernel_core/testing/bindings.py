"""A stand-in for a compiled CUDA module that takes what its bindings name, so that callers are tested without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_DEFINITION = re.compile(r'm\.def\(\s*"(\w+)"')
_ARGUMENT = re.compile(r'py::arg\("(\w+)"\)( = )?')


def bindings(folder: Path) -> dict[str, dict[str, bool]]:
    """Function -> argument -> whether it has a default, as the `bindings_*.cpp` of a folder say."""
    found: dict[str, dict[str, bool]] = {}
    for file in sorted(folder.glob("bindings_*.cpp")):
        text = file.read_text(encoding="utf-8")
        starts = list(_DEFINITION.finditer(text))
        for start, following in zip(starts, [*starts[1:], None], strict=False):  # a file may define nothing
            part = text[start.end() : following.start() if following else len(text)]
            found[start.group(1)] = {m.group(1): bool(m.group(2)) for m in _ARGUMENT.finditer(part)}
    return found


class FakeModule:
    """Refuses unknown and missing arguments with TypeError, notes every call, and answers with `results[name]`."""

    def __init__(self, folder: Path, results: dict[str, Any]) -> None:
        self._known, self._results = bindings(folder), results
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in self._known:
            raise AttributeError(f"the bindings have no function {name!r}")
        known = self._known[name]

        def call(*values: Any, **named: Any) -> Any:
            given = dict(zip(known, values, strict=False)) | named
            wrong = given.keys() - known.keys()
            missing = [argument for argument, optional in known.items() if not optional and argument not in given]
            if wrong or missing or len(values) > len(known):
                raise TypeError(f"{name}: unknown {sorted(wrong)}, missing {missing}")
            numbers = (bool, int, float)
            odd = [argument for argument, value in given.items() if not isinstance(value, numbers)]
            if odd:
                raise TypeError(f"{name}: {odd} are no numbers")
            self.calls.append((name, given))
            result = self._results.get(name)
            return result(**given) if callable(result) else result

        return call
