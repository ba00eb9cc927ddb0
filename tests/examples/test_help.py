"""Every script says what it takes: ``--help`` formats, which argparse only tries when it is asked."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from examples.__main__ import scripts

FOLDERS = [Path(__file__).parents[2] / name for name in ("examples", "experiments")]
COMMANDS = [name for folder in FOLDERS for name in scripts(folder)]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_printed_and_says_where_is_computed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "usage:" in said
    assert "--device" in said


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_list_of_scripts_is_whole(folder: Path) -> None:
    files = [path for path in folder.glob("[!_]*.py") if path.name != "__init__.py"]
    listed = scripts(folder)
    assert list(listed) == [f"{folder.name}.{path.stem}" for path in sorted(files)]
    assert all(says.endswith((".", "?")) or "(" in says for says in listed.values())
