"""Processes with a GPU each that store into each other's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs of one host"),
]


def test_all_gpus_of_the_host(tmp_path):
    world = min(8, torch.cuda.device_count())
    script = Path(__file__).parent / "two_ranks.py"
    command = [sys.executable, str(script)]
    running = [
        subprocess.Popen([*command, str(r), str(world), str(tmp_path / "meet")], stderr=subprocess.PIPE, text=True)
        for r in range(world)
    ]
    errors = []
    for process in running:
        try:
            _, text = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            _, text = process.communicate()
        errors.append((process.returncode, text[-2000:]))
    assert all(code == 0 for code, _ in errors), errors
