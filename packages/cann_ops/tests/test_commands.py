"""The commands: what they print, write and end with, here, where there is no NPU and no CANN."""

from __future__ import annotations

from cann_ops import build, cases, gate, lowering, verify
from cann_ops.status import device_file


def test_verify_needs_a_device(capsys):
    assert verify.main([]) == 2
    assert "torch_npu" in capsys.readouterr().out


def test_verify_in_emulation_writes_nothing(emulated, monkeypatch, tmp_path, capsys):
    before = device_file().exists()
    assert verify.main(["--host", "store_main"]) == 0
    assert capsys.readouterr().out == "store_main: pass\n" and device_file().exists() == before


def test_verify_says_by_how_much_an_op_is_wrong(emulated, monkeypatch, capsys):
    real = cases.worst
    monkeypatch.setattr(cases, "worst", lambda case, found: real(case, found) + 3)
    assert verify.main(["--host", "store_main"]) == 1
    assert "store_main: differs by 3, allowed is 0" in capsys.readouterr().out


def test_text_is_written_without_cann(lowers, tmp_path, capsys):
    assert build.main(["--text", str(tmp_path), "gather_rows"]) == 0
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".asc" and "// gather_rows(row=528)" in path.read_text()
    assert build.main(["--text"]) == 2 and "--text: got nothing" in capsys.readouterr().out


def test_compiling_needs_cann(lowers, monkeypatch, tmp_path, capsys):
    for variable in ("BISHENG_HOME", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CANN_OPS_BINARIES", str(tmp_path / "out"))
    assert build.main(["gather_rows"]) == 2
    assert "bisheng was not found" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_commands_that_lower_need_tilelang(monkeypatch, capsys):
    monkeypatch.setattr(lowering, "available", lambda: (False, "no TileLang"))
    assert gate.main([]) == 2 and build.main([]) == 2
    assert capsys.readouterr().out == "gate: no TileLang\nbuild: no TileLang\n"
