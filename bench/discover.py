"""Finding benches: every `bench/bench_*.py` of a package, loaded from its file."""

from __future__ import annotations

import fnmatch
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_core.bench import Bench, Case, source_digest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Entry:
    """A bench and the folder of the package that it came from."""

    bench: Bench
    package: Path

    def digest(self) -> str:
        """Fingerprint of the op's sources as they are now."""
        return source_digest(self.package, self.bench.sources, self.bench.device)


@dataclass(frozen=True)
class Found:
    """What discovery saw; `errors` maps a file to the reason why it could not be loaded."""

    entries: tuple[Entry, ...]
    errors: dict[str, str]

    def on(self, device: str) -> Found:
        """The benches of one kind of device, "cpu" or "cuda"."""
        return Found(tuple(entry for entry in self.entries if entry.bench.device == device), self.errors)

    def cases(self) -> Iterator[tuple[Entry, Case]]:
        """Every case with its entry, in file order."""
        for entry in self.entries:
            for case in entry.bench.cases:
                yield entry, case


def discover(root: Path = ROOT) -> Found:
    """Load the benches below `packages/` and `orchestrator/`; a broken file does not hide the others."""
    entries: list[Entry] = []
    errors: dict[str, str] = {}
    for path in sorted([*root.glob("packages/*/bench/bench_*.py"), *root.glob("orchestrator/bench/bench_*.py")]):
        package = path.parents[1]
        try:
            entries += [Entry(bench, package) for bench in _load(path)]
        except Exception as error:  # any error of a foreign file, to be shown beside its name
            errors[path.relative_to(root).as_posix()] = f"{type(error).__name__}: {error}"
    return Found(tuple(entries), errors)


def select(found: Found, names: Sequence[str], points: Sequence[str] = ()) -> list[tuple[Entry, Case]]:
    """Cases whose package, op, op without package, or point matches one of `names` (shell patterns allowed).

    With `points`, of these the ones whose point matches one of its patterns. Raises `ValueError` for a name or pattern
    that matches nothing.
    """
    for name in names:
        if not any(_matches(name, entry, case) for entry, case in found.cases()):
            known = sorted({entry.bench.op for entry in found.entries})
            raise ValueError(f"name: got {name!r}, allowed are a package, an op or a point; ops: {', '.join(known)}")
    chosen = [(e, c) for e, c in found.cases() if not names or any(_matches(name, e, c) for name in names)]
    for pattern in points:
        if not any(fnmatch.fnmatchcase(case.point, pattern) for _, case in chosen):
            raise ValueError(f"points: got {pattern!r}, which no chosen case matches")
    return [(e, c) for e, c in chosen if not points or any(fnmatch.fnmatchcase(c.point, pattern) for pattern in points)]


def _matches(name: str, entry: Entry, case: Case) -> bool:
    op = entry.bench.op
    return any(fnmatch.fnmatchcase(known, name) for known in (op, op.split(".")[-1], op.split(".")[0], case.point))


def _load(path: Path) -> Sequence[Bench]:
    spec = importlib.util.spec_from_file_location(f"bench_of_{path.parents[1].name}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    known = set(sys.modules)
    sys.path.insert(0, str(path.parent))  # for modules that the benches of a folder share
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
        _forget(set(sys.modules) - known, path.parent)
    benches = getattr(module, "BENCHES", None)
    if not isinstance(benches, (list, tuple)) or not all(isinstance(bench, Bench) for bench in benches):
        raise ValueError("BENCHES: got " + type(benches).__name__ + ", allowed is a list of kernel_core.bench.Bench")
    return benches


def _forget(names: set[str], folder: Path) -> None:
    """Another package's bench folder may hold a shared module of the same name."""
    for name in names:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
            del sys.modules[name]
