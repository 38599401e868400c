"""`fathom simulate` on the command line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.commands.errors import UsageError
from orchestrator.simulate.faults import MENU


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_one_seed_with_its_trace():
    result = run("--seed", "3", "--minutes", "0.5", "--trace", "--only", "r1")
    assert result.exit_code == 0 and "seed 3: ok" in result.stdout and "ClientRequest(request=r1" in result.stdout
    assert "virtual s" in result.stdout


def test_seeds_and_their_file(tmp_path):
    path = tmp_path / "made" / "sweep.json"
    result = run("--seeds", "2", "--minutes", "0.5", "--faults", "crash, loss", "--json", str(path))
    assert result.exit_code == 0 and "every invariant held in every run" in result.stdout
    written = json.loads(path.read_text())
    assert written["runs"] == 2 and not written["failed"] and set(written["faults"]) <= {"crash", "loss"}
    assert written["virtual_s"] >= 60 and written["tokens"] > 0


def test_a_broken_variant_fails_and_shrinks():
    result = run("--seed", "1", "--minutes", "1", "--break", "dedup_by_index", "--shrink")
    assert result.exit_code == 1 and "invariant" in result.stdout and "needed:" in result.stdout
    swept = run("--seeds", "1", "--minutes", "1", "--break", "dedup_by_index")
    assert swept.exit_code == 1
    assert "fathom simulate --seed 1 --minutes 1 --break dedup_by_index --shrink --trace" in swept.stdout


def test_no_faults_at_all():
    result = run("--seed", "2", "--minutes", "0.5", "--faults", "none", "--trace")
    assert result.exit_code == 0 and "!!" not in result.stdout


def test_the_menu():
    result = run("--list-faults")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == len(MENU) and "torn_write" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--minutes", "0"], "--minutes"),
        (["--faults", "meteor", "--seed", "1"], "--faults"),
        (["--trace"], "--seed"),
        (["--matrix", "--broken-variants"], "give one"),
        (["--break", "nothing", "--seed", "1"], "break"),
    ],
)
def test_bad_options_are_named(arguments, word):
    result = run(*arguments)
    assert result.exit_code != 0 and isinstance(result.exception, (UsageError, ValueError))
    assert word in str(result.exception)
