"""What a command has measured, as a file that another run makes a page of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def save(path: Path, found: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def load(path: Path, what: str, command: str, keys: Sequence[str]) -> dict[str, Any]:
    """Raises ValueError where the file is not one of `save` with these keys; `what` and `command` are for its text."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: got no measurement of {what} ({error}); `{command}` makes one") from error
    if not isinstance(found, dict) or not all(key in found for key in keys):
        raise ValueError(f"{path}: got no measurement of {what}; `{command}` makes one")
    return found
