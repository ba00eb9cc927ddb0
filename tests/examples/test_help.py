"""Every script says what it takes: ``--help`` formats, which argparse only tries when it is asked."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import examples

SCRIPTS = sorted(path.stem for path in Path(examples.__path__[0]).glob("*.py") if "def main(argv" in path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"examples.{name}").main(["--help"])
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out
