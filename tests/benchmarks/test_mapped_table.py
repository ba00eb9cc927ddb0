"""The benchmark of mapped tables refuses what it cannot do in one sentence."""

from __future__ import annotations

import runpy
import sys

import pytest


def test_a_folder_that_is_not_there_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["mapped_table", "100", "--folder", "nowhere"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("benchmarks.mapped_table", run_name="__main__")
    assert "--folder must be a folder that is there, got nowhere" in capsys.readouterr().err
