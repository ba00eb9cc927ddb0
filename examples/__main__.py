"""``python -m examples`` lists the scripts: what each asks, in one line."""

from __future__ import annotations

import ast
from pathlib import Path


def scripts(folder: Path) -> dict[str, str]:
    """Return the first line of every file that is run by itself, by the name it is run under."""
    found = {}
    for path in sorted(folder.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.If) and "__main__" in ast.unparse(part.test) for part in tree.body):
            found[f"{folder.name}.{path.stem}"] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found


def show(folder: Path) -> None:
    """Print the list."""
    found = scripts(folder)
    width = max(map(len, found))
    for name, says in found.items():
        print(f"python -m {name:{width}}  {says}")


if __name__ == "__main__":
    show(Path(__file__).parent)
    print("Each has --help. The papers' settings: python -m experiments.")
