"""Every op against its reference on this machine's NPU, and a status file of it: `python -m cann_ops.verify`.

With `--host` the kernels run in host emulation instead; that writes nothing.
"""

from __future__ import annotations

import json
import sys

from cann_ops import cases
from cann_ops.launch import host_emulation
from cann_ops.runtime.available import is_available
from cann_ops.status import device_file


def main(words: list[str]) -> int:
    host = "--host" in words
    chosen = [word for word in words if not word.startswith("--")]
    if not host:
        there, why = is_available()
        if not there:
            print(f"verify: {why}")
            return 2
    results = {}
    for name, case in cases.cases().items():
        if chosen and name not in chosen:
            continue
        try:
            if host:
                with host_emulation():
                    found = cases.run(case, "cpu")
            else:
                found = cases.run(case, "npu")
            error = cases.worst(case, found)
            results[name] = "pass" if error <= case[3] else f"differs by {error:.3g}, allowed is {case[3]:.3g}"
        except (RuntimeError, ValueError) as failure:
            results[name] = f"{type(failure).__name__}: {failure}"
        print(f"{name}: {results[name]}", flush=True)
    if not host:
        path = device_file()
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")
    return 0 if all(result == "pass" for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
