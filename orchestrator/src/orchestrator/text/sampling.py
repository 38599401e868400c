"""How a model likes to be sampled where nobody says: generation_config.json, as other libraries read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "generation_config.json"
_NEUTRAL: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """`temperature`, `top_p` and `top_k` of a model folder; 1, 1 and 0 (all tokens) where it has no such file.

    Raises ValueError naming the file if it is damaged or a value is no number.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return dict(_NEUTRAL)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {name: content.get(name, neutral) for name, neutral in _NEUTRAL.items()}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{path}: got {value!r} for {name}, allowed is a number")
    return found


def write_sampling_defaults(folder: str | Path, *, temperature: float, top_p: float) -> None:
    """Write the file into a model folder."""
    content = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    (Path(folder) / FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
