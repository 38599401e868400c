"""`import orchestrator` stays cheap; its two names come on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import orchestrator


def test_import_loads_no_library():
    code = (
        "import sys, orchestrator; print([m for m in ('torch', 'numpy', 'fastapi', 'tokenizers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_lazy_names():
    from orchestrator.engine.request import SamplingParams

    assert orchestrator.SamplingParams is SamplingParams
    assert {"LLM", "SamplingParams"} <= set(dir(orchestrator))
    with pytest.raises(AttributeError, match="has no attribute 'Model'"):
        orchestrator.Model  # noqa: B018


def test_a_router_needs_no_torch():
    """Its process starts anew in a moment and takes little memory."""
    code = """
import sys
from orchestrator.roles.router import Router
from orchestrator.service.process import build as build_core
from orchestrator.service.process import shell
print([m for m in ("torch", "kernel_core.backend", "orchestrator.engine.engine") if m in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
