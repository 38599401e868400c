"""`fathom figures`: capacity and policy studies on recorded traffic, with pictures and a page."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.commands.errors import UsageError
from orchestrator.commands.paths import need_root, project_root

_FOLDER = Path("docs") / "service"
_PAGE = Path("docs") / "service_figures.md"


@dataclass(frozen=True)
class FiguresOptions:
    """The options of the command, as given. `only` is a list with commas; empty runs every study."""

    traces: Path | None = None
    out: Path | None = None
    page: Path | None = None
    matrix: Path | None = None
    only: str = ""
    quick: bool = False
    redraw: bool = False
    seed: int = 0


def figures(options: FiguresOptions) -> int:
    """Run the studies, write `figures.json` and pictures into a folder, and the page's tables; returns 0."""
    from orchestrator.simulate.figures.run import NAMES, Studies, load, run
    from orchestrator.simulate.figures.sizes import FULL, QUICK
    from orchestrator.simulate.figures.traces import traces_folder

    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("figures need matplotlib: pip install matplotlib")
    only = tuple(part.strip() for part in options.only.split(",") if part.strip()) or NAMES
    for name in only:
        if name not in NAMES:
            raise UsageError(f"--only: got {name!r}, allowed are {', '.join(NAMES)}, with commas between them")
    if options.matrix is not None and not options.matrix.is_file():
        raise UsageError(f"--matrix: got {options.matrix}, allowed is the JSON of `fathom simulate --matrix`")
    if options.quick and (options.out is None or options.page is None):
        raise UsageError("--quick: give --out and --page too, so that small samples don't replace the report")
    out = options.out or need_root("figures without --out") / _FOLDER
    page = options.page or need_root("figures without --page") / _PAGE
    results = out / "figures.json"
    if not options.redraw:
        folder = traces_folder(options.traces, project_root())
        began = time.perf_counter()

        def say(line: str) -> None:
            print(f"{time.perf_counter() - began:6.0f} s  {line}", file=sys.stderr, flush=True)

        sizes = QUICK if options.quick else FULL
        run(Studies(folder, sizes, options.seed, options.matrix, say=say), results, only)
    content = load(results)

    from orchestrator.simulate.figures.draw import write
    from orchestrator.simulate.figures.page import write_page

    pictures = write(out, content)
    write_page(page, content, pictures)
    print(f"{results}\n{page}\n" + "\n".join(map(str, pictures)))
    return 0
