"""Every benchmark still starts: its imports are there and its arguments are described."""

from __future__ import annotations

import runpy
import sys

import pytest

from tests.support.launch import ROOT

PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "argparse.ArgumentParser(" in path.read_text()
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_printed(program, monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / program), run_name="__main__")
    assert caught.value.code == 0 and program in capsys.readouterr().out
