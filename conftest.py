"""Shapes are executed while the suite runs, although jaxtyping is no dependency of the library.

The library imports jaxtyping for the type checker only (``if TYPE_CHECKING``), so that a user does
not need it. beartype looks a name of an annotation up in the module's globals and then among the
builtins; there it finds jaxtyping's here. The hook that decorates every function of the library is
pytest's option ``--jaxtyping-packages`` in pyproject.toml. With torch 2.6 it is taken out again: its ``torch.compile``
cannot read a decorated function, and that all layers compile is a law of the suite.
"""

from __future__ import annotations

import builtins
import sys

import jaxtyping
import torch

for name in ("Bool", "Complex", "Float", "Inexact", "Int", "Int64", "Num", "Shaped"):
    setattr(builtins, name, getattr(jaxtyping, name))

if torch.__version__.startswith("2.6."):
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "jaxtyping._import_hook"]
