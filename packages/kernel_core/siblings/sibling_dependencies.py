"""Dependencies of a kernel package, with sister packages taken from the same checkout when it is there.

`pip install ./packages/NAME` has to work in an empty environment, and the sisters are on no index. Inside a
checkout they are named by the absolute address of their folder; elsewhere (an sdist) by name alone.
scikit-build-core calls `dynamic_metadata` as a metadata provider.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SISTERS = Path(__file__).resolve().parents[2]


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, list[str]]:
    wanted = list(settings.get("requires", ()))
    for name in settings.get("siblings", ()):
        folder = _SISTERS / name
        wanted.append(f"{name} @ {folder.as_uri()}" if (folder / "pyproject.toml").is_file() else name)
    return {"dependencies": wanted}
