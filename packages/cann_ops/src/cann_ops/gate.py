"""The lowering gate: every shape is lowered and its structure checked. `python -m cann_ops.gate [word ..]`.

Words choose the kernels whose names hold one of them. Prints a line a kernel, or with `--table` the memories as a
table; ends with 1 if anything is wrong, and with 2 where TileLang is missing. The text stays outside of the repository,
in the cache of lowered kernels.
"""

from __future__ import annotations

import sys
import time

from cann_ops import lowering, structure
from cann_ops.errors import NotLoweredError
from cann_ops.shapes import SHAPES


def table() -> str:
    """KiB of each memory that the kernels use, as text; the largest of the shapes of a program."""
    used: dict[str, dict[str, int]] = {}
    for shape in SHAPES:
        row = used.setdefault(shape.kernel.module, {})
        for name, size in structure.read(lowering.lower(shape.kernel)).memory.items():
            row[name] = max(row.get(name, 0), size)
    names = list(structure.LIMITS)
    lines = ["| program | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for module, row in used.items():
        cells = (f"{row[name] / 1024:.1f}" if row.get(name) else "-" for name in names)
        lines.append(f"| `{module}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    there, why = lowering.available()
    if not there:
        print(f"gate: {why}")
        return 2
    if "--table" in words:
        print(table(), end="")
        return 0
    failed = 0
    for shape in SHAPES:
        if words and not any(word in str(shape.kernel) for word in words):
            continue
        began = time.monotonic()
        try:
            lowered = lowering.lower(shape.kernel)
        except NotLoweredError as error:
            said = [str(error)]
            used = ""
        else:
            said = structure.problems(lowered, shape.core, shape.calls)
            memory = structure.read(lowered).memory
            used = ", ".join(f"{name} {memory[name] / 1024:.1f} KiB" for name in sorted(memory) if memory[name])
        failed += bool(said)
        print(f"{'FAILED' if said else 'ok':6} {shape.kernel}  {used}  {time.monotonic() - began:.1f} s", flush=True)
        for line in said:
            print(f"       {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
