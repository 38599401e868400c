from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from orchestrator import cli
from orchestrator.commands import cluster, cluster_client
from orchestrator.commands.cluster_options import ClusterOptions, config_of
from orchestrator.commands.errors import UsageError
from orchestrator.commands.serve import ServeOptions


def call(*args):
    """The command line in this process: (exit status, output, error)."""
    result = CliRunner().invoke(cli.app, list(args))
    return result.exit_code, result.output, result.exception


def printed(*args):
    status, output, error = call("serve", "--model", "v41-mini", "--print-config", *args)
    assert status == 0, error
    return json.loads(output)


def test_print_config_is_a_whole_file_and_can_be_read_back(tmp_path):
    first = printed("--cluster", "local", "--prefill", "2", "--decode", "3", "--max-num-seqs", "80")
    assert first["roles"] == {"prefill": 2, "decode": 3, "encoder": 0, "prefill_ep": 1, "decode_ep": 1}
    assert first["engine"]["max_num_seqs"] == 80 and first["engine"]["max_step_tokens"] == 640
    assert first["model"]["path"].startswith("/") and first["model"]["path"].endswith("v41-mini")
    file = tmp_path / "service.json"
    file.write_text(json.dumps(first))
    assert printed("--cluster-config", str(file)) == first


def test_options_go_before_the_file_and_the_file_before_defaults(tmp_path):
    file = tmp_path / "service.toml"
    file.write_text(
        "[roles]\nprefill = 4\ndecode = 5\n[engine]\nnum_blocks = 99\nmax_num_seqs = 3\nprefix_cache = 'canonical'\n"
        "[cluster]\nlauncher = 'ray'\ngrace = 5.0\n"
    )
    found = printed("--cluster-config", str(file), "--decode", "1", "--num-blocks", "512")
    assert found["roles"]["prefill"] == 4 and found["roles"]["decode"] == 1
    assert found["engine"]["num_blocks"] == 512  # given, though it is the default
    assert found["engine"]["max_num_seqs"] == 3 and found["engine"]["prefix_cache"] == "canonical"
    assert found["cluster"]["launcher"] == "ray" and found["cluster"]["grace"] == 5.0
    assert printed("--cluster-config", str(file), "--cluster", "local")["cluster"]["launcher"] == "local"


def test_options_of_one_process_keep_their_meaning():
    found = printed(
        *("--cluster", "local", "--max-context", "4096", "--max-requests", "9", "--speculation", "3", "--threads", "2"),
        *("--no-reproducible", "--image-cache-gb", "0.5", "--store", "embedded:/var/kv", "--cache-gb", "2"),
    )
    engine = found["engine"]
    assert (engine["max_model_len"], engine["max_waiting"], engine["speculation"]) == (4096, 9, 3)
    assert (engine["threads"], engine["dense"], engine["image_bytes"]) == (2, "library", 1 << 29)
    assert engine["prefix_cache"] == "bounded"  # as in one process, where products are not reproducible
    assert (found["store"]["kind"], found["store"]["folder"]) == ("embedded", "/var/kv")
    assert found["store"]["capacity_gb"] == 2.0


def test_defaults_of_a_service():
    found = printed("--cluster", "local")
    assert found["roles"]["encoder"] == 0 and found["store"]["kind"] == "none"
    assert found["engine"]["prefix_cache"] == "exact" and found["engine"]["dense"] == "fixed"


WRONG = {
    "roles alone": (("--prefill", "2"), "--prefill: means nothing in one process"),
    "print alone": (("--print-config",), "--print-config: means nothing in one process"),
    "store alone": (("--store", "embedded"), "--store: means nothing in one process"),
    "launcher": (("--cluster", "slurm"), "allowed are local and ray"),
    "address": (("--cluster", "local", "--cluster-address", "auto"), "give --cluster ray too"),
    "folder": (("--cluster", "local", "--cache-folder", "x"), "--store embedded:FOLDER"),
    "windows": (("--cluster", "local", "--window-peer", "a:1"), "--window-peer: cannot be used"),
    "kind": (("--cluster", "local", "--store", "tape"), "allowed are none, embedded"),
    "directory": (("--cluster", "local", "--store", "directory"), "directory:FOLDER"),
    "size": (("--cluster", "local", "--cache-gb", "3"), "--cache-gb: got a size and no store"),
    "off": (("--cluster", "local", "--store", "embedded", "--prefix-cache", "off"), "--prefix-cache off"),
    "context": (("--cluster", "local", "--max-context", "999999"), "--max-context: got 999999"),
    "file": (("--cluster-config", "nowhere.toml"), "cannot be read"),
    "model": (("--cluster", "local", "--model", "nowhere"), "v41-mini"),
    "key": (("--cluster", "local", "--host", "0.0.0.0"), "--api-key-file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_say_what_to_do(name, monkeypatch):
    monkeypatch.delenv("FATHOM_API_KEYS", raising=False)
    options, words = WRONG[name]
    status, _, error = call("serve", *options)
    assert status and isinstance(error, UsageError) and words in str(error), error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[roles]\nprefil = 2\n", "prefil"),
        ("[roles]\nprefill = 0\n", "roles.prefill"),
        ("[times]\nlunch = 3.0\n", "lunch"),
        ("[times]\nlease = 0.1\n", "times.lease"),
        ("[cluster]\nstrategy = 'HEAP'\n", "cluster.strategy"),
        ("[cluster]\naddress = 'auto'\n", "--cluster ray"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, text, words):
    file = tmp_path / "service.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        config_of(ServeOptions(), ClusterOptions(cluster_config=file), frozenset())


def test_encoders_need_a_model_that_reads_images(tmp_path):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import preset

    make_model(preset("v41-nano"), tmp_path / "nano")
    options = ServeOptions(model=str(tmp_path / "nano"))
    with pytest.raises(UsageError, match="--encoder: got 1, allowed is 0"):
        cluster.serve_cluster(options, ClusterOptions("local", encoder=1, print_config=True), frozenset())


@pytest.mark.parametrize("command", ["status", "drain"])
def test_client_commands_have_help_and_say_when_nobody_answers(command):
    status, output, _ = call("cluster", command, "--help")
    assert status == 0 and "Examples:" in output
    names = ("decode-0",) if command == "drain" else ()
    _, _, error = call("cluster", command, *names, "--url", "http://127.0.0.1:9")
    assert isinstance(error, UsageError) and "--url" in str(error)


def test_status_is_shown_as_a_table(monkeypatch, capsys):
    worker = {"name": "decode-0", "state": "up", "life": 2, "pid": 4711, "node": "here", "held": 3, "steps": 17}
    worker |= {"waiting": 0.0, "memory": 5 << 20, "since": 12.3, "last_exit": "signal 9 (SIGKILL)"}
    recovery = {"name": "decode-0", "life": 2, "noticed": 100.0, "up": 104.5, "why": "signal 9 (SIGKILL)"}
    found = {"workers": [worker], "recoveries": [recovery], "entry": {"live": 1, "outcomes": {"finished": 8}}}
    monkeypatch.setattr(cluster_client, "_ask", lambda *args: found)
    assert cluster_client.status("http://x", None, False) == 0
    shown = capsys.readouterr().out
    for words in ("decode-0", "4711", "SIGKILL", "up again after 4.5 s", "1 open, 8 finished"):
        assert words in shown
    found["trouble"] = "decode: all have failed"
    assert cluster_client.status("http://x", None, True) == 1
    assert json.loads(capsys.readouterr().out)["trouble"]
