"""``python -m examples`` lists the scripts: what each asks, in one line."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent


def scripts() -> dict[str, str]:
    """Return the first line of every file that is run by itself, by the name it is run under."""
    found = {}
    for path in sorted(HERE.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.If) and "__main__" in ast.unparse(part.test) for part in tree.body):
            found[f"examples.{path.stem}"] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found


if __name__ == "__main__":
    found = scripts()
    width = max(map(len, found))
    for name, says in found.items():
        print(f"python -m {name:{width}}  {says}")
    print("Each explains itself with --help. Short ones to learn from stand in docs/guide.")
