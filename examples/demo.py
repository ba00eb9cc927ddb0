"""The first minute: train a hyperbolic transformer, compare it, certify it, draw it."""

from __future__ import annotations

import sys

from experiments.acquired_traits import main

if __name__ == "__main__":
    sys.exit(main())
