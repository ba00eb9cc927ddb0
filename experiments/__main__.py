"""``python -m experiments`` lists the scripts: what each asks, in one line."""

from __future__ import annotations

from pathlib import Path

from examples.__main__ import show

if __name__ == "__main__":
    show(Path(__file__).parent)
    print("Each explains itself with --help. Short scripts to learn from: python -m examples.")
