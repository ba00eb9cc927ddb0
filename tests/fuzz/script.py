"""A call as a script that one can run from the repository's root."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from geoopt import ManifoldParameter
from torch import Tensor, nn

from holonomy.manifolds import Lorentz

__all__ = ["literal", "script"]

_HEAD = """\
import geoopt
import torch
from torch import nn, tensor

from holonomy import layers, models, structures, theory
from holonomy.manifolds import *
from tests.fuzz import domains
"""


def literal(value: Any) -> str:
    """Write a value as an expression."""
    if isinstance(value, ManifoldParameter):
        return f"geoopt.ManifoldParameter({_numbers(value)}, manifold={literal(value.manifold)})"
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, Lorentz):
        learnable = ", learnable=True" * value.curvature_parameter.log_ratio.requires_grad
        return f"Lorentz({value.curvature_parameter.initial.item()!r}{learnable}, dtype={value.curvature.dtype})"
    if isinstance(value, np.ndarray):
        return f"{literal(torch.from_numpy(value))}.numpy()"
    if type(value) is object:
        return "object()"
    if isinstance(value, torch.Generator):
        return f"torch.Generator().manual_seed({value.initial_seed()})"
    if isinstance(value, nn.Module):
        return getattr(value, "made_by", f"nn.{value!r}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init and not f.name.startswith("_")
        }
        return f"{type(value).__name__}({', '.join(f'{name}={literal(x)}' for name, x in fields.items())})"
    if isinstance(value, list | tuple):
        return _sequence(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {literal(x)}" for name, x in value.items()) + "}"
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__name__", value))
    return {"nan": "float('nan')", "inf": "float('inf')", "-inf": "-float('inf')"}.get(repr(value), repr(value))


def _sequence(values: list[Any] | tuple[Any, ...]) -> str:
    inner = ", ".join(map(literal, values))
    if isinstance(values, list):
        return f"[{inner}]"
    named = type(values).__name__ * hasattr(values, "_fields")
    return f"{named}({inner}{',' * (len(values) == 1)})"


def _tensor(x: Tensor) -> str:
    if x.is_sparse:
        return f"{_tensor(x.to_dense())}.to_sparse()"
    if x.is_meta:
        return f"torch.empty({tuple(x.shape)}, dtype={x.dtype}, device='meta')"
    asks = ".requires_grad_()" * x.requires_grad
    if x.ndim and 0 in x.stride() and x.numel() > 1:
        return f"{_numbers(x[:1])}.expand{tuple(x.shape)}{asks}"
    if not x.is_contiguous():
        return f"torch.empty_strided({tuple(x.shape)}, {x.stride()}, dtype={x.dtype}).copy_({_numbers(x)}){asks}"
    return f"{_numbers(x)}{asks}"


def _numbers(x: Tensor) -> str:
    values = str(x.detach().tolist()).replace("nan", "float('nan')").replace("inf", "float('inf')")
    shape = f".reshape{tuple(x.shape)}" * (x.numel() == 0)
    return f"tensor({values}, dtype={x.dtype}){shape}"


def script(setup: Sequence[str], written: str, arguments: dict[str, Any], comment: str) -> str:
    """The lines that make a call, and what is wrong with it."""
    lines = [_HEAD, *setup, *(f"{name} = {literal(value)}" for name, value in arguments.items())]
    star = [f"*{name}" if name == "size" else f"{name}={name}" for name in arguments]
    return "\n".join([*lines, f"print({written}({', '.join(star)}))  # {comment}"])
