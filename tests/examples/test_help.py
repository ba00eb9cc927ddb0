"""Every script says what it takes: ``--help`` formats, which argparse only tries when it is asked."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import examples
from examples.__main__ import scripts

SCRIPTS = sorted(path.stem for path in Path(examples.__path__[0]).glob("*.py") if "def main(argv" in path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"examples.{name}").main(["--help"])
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_the_list_of_scripts_is_whole() -> None:
    listed = scripts()
    assert list(listed) == [f"examples.{name}" for name in SCRIPTS]
    assert all(says.endswith((".", "?")) or "(" in says for says in listed.values())


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_where_it_computes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"examples.{name}").main(["--help"])
    assert "--device" in capsys.readouterr().out
