import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from orchestrator import cli
from orchestrator.commands import paths
from orchestrator.commands.errors import UsageError
from orchestrator.commands.serve import read_keys


def fathom(*args, **options):
    """The command line in a process of its own."""
    return subprocess.run([sys.executable, "-m", "orchestrator.cli", *args], capture_output=True, text=True, **options)


def call(*args):
    """The command line in this process: (exit status, output, error)."""
    result = CliRunner().invoke(cli.app, list(args))
    return result.exit_code, result.output, result.exception


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "nano"
    done = fathom("init", "v41-nano", str(folder), "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout and str(folder) in done.stdout
    return folder


def test_help_is_quick_and_has_examples():
    took = []
    for _ in range(3):
        began = time.monotonic()
        done = fathom("--help")
        took.append(time.monotonic() - began)
    assert done.returncode == 0 and "Examples:" in done.stdout and "fathom serve" in done.stdout
    assert min(took) < 1.0


@pytest.mark.parametrize("command", ["generate", "serve", "init", "doctor"])
def test_every_command_has_help(command):
    status, output, _ = call(command, "--help")
    assert status == 0 and "Usage: " in output


def test_help_needs_no_heavy_library():
    code = "import sys, orchestrator.cli; print(sorted({'torch', 'numpy', 'fastapi', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_init_keeps_what_is_there(nano):
    done = fathom("init", "v41-nano", str(nano))
    assert done.returncode == 2 and "--force" in done.stderr and "Traceback" not in done.stderr
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {file.name for file in nano.iterdir()}


def test_generate_is_repeatable_and_prints_its_speed(nano):
    args = ("generate", "def f(", "--model", str(nano), "--max-tokens", "12", "--seed", "5")
    first, second = fathom(*args, "--stats"), fathom(*args, "--threads", "1")
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout != ""
    assert re.search(r"\d+ prompt tokens, 12 new tokens, first token after [\d.]+ s, [\d.]+ tokens/s", first.stderr)
    assert second.stderr == ""


def test_generate_over_several_ranks(nano):
    args = ("generate", "def f(", "--model", str(nano), "--max-tokens", "12", "--seed", "5")
    alone, spread = fathom(*args), fathom(*args, "--ep", "2", "--stats")
    assert spread.returncode == 0, spread.stderr
    assert spread.stdout == alone.stdout != "" and "2 ranks, 3.4 MiB of" in spread.stderr
    refused = fathom(*args, "--ep", "2", "--device", "cuda")
    assert refused.returncode == 2 and "device" in refused.stderr


def test_generate_within_a_schema_file_and_from_standard_input(nano, tmp_path):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    done = fathom("generate", "-", "--model", str(nano), "--json-schema", str(file), input="Answer:")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) in ({"ok": True}, {"ok": False})


WRONG = {
    "grammar": (("--regex", "(("), "unclosed group"),
    "two grammars": (("--regex", "a", "--lark", 'start: "a"'), "Give one of"),
    "range": (("--top-p", "3"), "--top-p"),
    "stop": (("--stop", ""), "--stop"),
    "device": (("--device", "cuda"), "doctor"),
    "model": (("--model", "nowhere"), "v41-mini"),
    "plan alone": (("--ep-plan", "decode"), "give --ep too"),
    "plan": (("--ep", "2", "--ep-plan", "often"), "off, prefill, decode, all"),
    "slots": (("--ep", "2", "--ep-slots", "1"), "slots: got 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_say_what_to_do(nano, name):
    options, words = WRONG[name]
    model = () if name == "model" else ("--model", str(nano))
    status, _, error = call("generate", "x", *model, *options)
    assert status and isinstance(error, UsageError | ValueError) and words in str(error)


def test_mistakes_are_printed_without_a_traceback(nano):
    done = fathom("generate", "x", "--model", str(nano), "--regex", "((")
    assert done.returncode == 1 and done.stderr.startswith("fathom: ") and "Traceback" not in done.stderr


def test_folder_without_a_model(tmp_path):
    status, _, error = call("generate", "x", "--model", str(tmp_path))
    assert status and isinstance(error, UsageError) and "fathom init" in str(error)
    status, _, error = call("generate", "", "--model", str(tmp_path))
    assert "empty" in str(error)


def test_large_model_is_not_written():
    _, _, error = call("init", "v41-flash")
    assert isinstance(error, UsageError) and "checkpoint" in str(error)


def test_serve_refuses_open_hosts_without_a_key(monkeypatch):
    monkeypatch.delenv("FATHOM_API_KEYS", raising=False)
    _, _, error = call("serve", "--host", "0.0.0.0")
    assert isinstance(error, UsageError) and "--api-key-file" in str(error)
    monkeypatch.setenv("FATHOM_API_KEYS", "short")
    _, _, error = call("serve")
    assert isinstance(error, UsageError) and "8 characters" in str(error)


def test_keys_come_from_file_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FATHOM_API_KEYS", "from-environment, another-one")
    file = tmp_path / "keys"
    file.write_text("# mine\nfrom-file-1 # laptop\n\nfrom-environment\n")
    assert read_keys(file) == ("from-environment", "another-one", "from-file-1")
    file.write_text("# nothing\n")
    for bad in (file, tmp_path / "missing"):
        with pytest.raises(UsageError, match="--api-key-file"):
            read_keys(bad)


def test_serve_answers_and_stops(nano):
    command = [sys.executable, "-m", "orchestrator.cli", "serve", "--port", "0", "--model", str(nano), "--name", "n"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        url = re.search(r"http://[\d.:]+", line)
        assert url, line + process.stderr.read()
        body = {"model": "n", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1}
        with httpx.Client(base_url=url[0], timeout=30) as client:
            answers = [client.post("/v1/chat/completions", json=body).json() for _ in range(2)]
            contents = [answer["choices"][0]["message"]["content"] for answer in answers]
            assert contents[0] == contents[1] and answers[0]["usage"]["completion_tokens"] <= 4
            too_long = {**body, "max_tokens": 10**6}
            assert client.post("/v1/chat/completions", json=too_long).status_code == 400
            assert client.get("/health").json()["status"] == "ok"
        taken = fathom("serve", "--port", url[0].rsplit(":", 1)[1], "--model", str(nano))
        assert taken.returncode == 2 and "give another" in taken.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGTERM)


def test_default_model_is_made_once_and_said_to_be_random(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paths, "project_root", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(paths, "DEFAULT_MODEL", "v41-nano")
    folder = paths.find_model(None)
    assert folder == tmp_path / "fathom" / "models" / "v41-nano" and paths.is_model(folder)
    assert "random weights, untrained" in capsys.readouterr().err
    assert paths.find_model(None) == folder and capsys.readouterr().err == ""
    assert [file.name for file in folder.parent.iterdir()] == ["v41-nano"]


def test_checkout_is_preferred(tmp_path, monkeypatch):
    for part in ("packages", "orchestrator", "models/v41-mini"):
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "models/v41-mini/config.json").write_text("{}")
    monkeypatch.setenv("FATHOM_ROOT", str(tmp_path))
    assert paths.find_model(None) == tmp_path / "models" / "v41-mini"
    assert paths.cache_folder() == tmp_path / ".fathom"


@pytest.mark.parametrize("command", ["bench", "test"])
def test_arguments_are_passed_on(command, monkeypatch):
    seen = []

    class Done:
        returncode = 7

    monkeypatch.setattr(subprocess, "run", lambda args, **kwargs: seen.append((args, kwargs["cwd"])) or Done)
    status, _, _ = call(command, "--help", "-k", "topk", "packages/mla_fp4")
    assert status == 7
    args, root = seen[0]
    assert args[-4:] == ["--help", "-k", "topk", "packages/mla_fp4"] and Path(root) == paths.project_root()
    assert args[1:3] == ["-m", "pytest" if command == "test" else "bench"]


def test_commands_on_the_checkout_need_one(monkeypatch):
    monkeypatch.setenv("FATHOM_ROOT", os.sep)
    _, _, error = call("bench", "list")
    assert isinstance(error, UsageError) and "checkout" in str(error)


def test_doctor_finds_things(capsys):
    status, output, _ = call("doctor", "--quick")
    assert status == 0, output
    for word in ("python", "torch", "deepseek-recipe", "mla_fp4", "cpu", "nvidia sm90", "v41-mini"):
        assert word in output
