"""Fathom's orchestrator: composes the kernel packages into a served model.

`from orchestrator import LLM, SamplingParams`. Both are imported on first use, so that `import orchestrator` is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.engine.llm import LLM
    from orchestrator.engine.request import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"

_HOME = {"LLM": "orchestrator.engine.llm", "SamplingParams": "orchestrator.engine.request"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
