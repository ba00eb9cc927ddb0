"""The shapes of tensors in annotations, by the names of jaxtyping.

Type checkers and editors read jaxtyping's own. Nothing imports it at run time, where annotations are text: a name is
None, or what stands among the builtins, where the suite puts jaxtyping's to check every shape (``conftest.py``).
``Ambient`` are points and tangent vectors by all of their coordinates, ``(..., d + 1)`` in hyperbolic space.
"""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Int64, Shaped

    Ambient = Float[Tensor, "... ambient"]
else:
    names = ("Bool", "Float", "Int", "Int64", "Shaped")
    Bool, Float, Int, Int64, Shaped = (getattr(builtins, name, None) for name in names)
    Ambient = None if Float is None else Float[Tensor, "... ambient"]

__all__ = ["Ambient", "Bool", "Float", "Int", "Int64", "Shaped"]
