"""Compile the kernels with CANN's compiler: `python -m cann_ops.build [--text FOLDER] [word ..]`.

Lowers every shape of `cann_ops.shapes` (of kernels whose names hold a word) and compiles it into the folder of
binaries, CANN_OPS_BINARIES. Needs tilelang, and bisheng and ld.lld of CANN 9.2. With `--text` it writes the AscendC of
each kernel into a folder and compiles nothing, for which CANN is not needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cann_ops import lowering
from cann_ops.emulate.build import templates_dir
from cann_ops.errors import CannUnavailableError
from cann_ops.runtime import binaries
from cann_ops.shapes import SHAPES


def main(words: list[str]) -> int:
    there, why = lowering.available()
    templates = templates_dir()
    if not there or templates is None:
        print(f"build: {why or 'the headers of TileLang were not found'}")
        return 2
    folder = None
    if "--text" in words:
        at = words.index("--text")
        if at + 1 == len(words):
            print("build: --text: got nothing, allowed is a folder")
            return 2
        folder = Path(words[at + 1])
        words = words[:at] + words[at + 2 :]
        folder.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        if words and not any(word in str(shape.kernel) for word in words):
            continue
        lowered = lowering.lower(shape.kernel)
        if folder is not None:
            path = folder / f"{binaries.binary_path(lowered).stem}.asc"
            path.write_text(f"// {shape.kernel}\n{lowered.source}", encoding="utf-8")
        else:
            try:
                path = binaries.build(lowered, templates)
            except CannUnavailableError as error:
                print(f"build: {error}")
                return 2
        print(f"{shape.kernel}: {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
