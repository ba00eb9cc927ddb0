"""Which tensors the Triton kernels serve, and Triton's language for the modules that hold them.

The rule, everywhere: CUDA tensors of at most 32 bits, Triton 3.6 or newer installed (torch's wheel for GPUs brings it
along), and a form that the kernel knows. Else the plain or the chunked form runs, which means the same. Nothing imports
Triton before the first tensor that it serves.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["TRITON", "Language", "language", "serves"]


def _installed() -> bool:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (3, 6)


TRITON = _installed()
"""Whether Triton is installed, in a version that the kernels were compiled with."""

_SERVED = (torch.float32, torch.bfloat16, torch.float16)


def serves(*tensors: Tensor) -> bool:
    """Whether kernels in Triton take these tensors."""
    return TRITON and all(tensor.is_cuda and tensor.dtype in _SERVED for tensor in tensors)


class Language(NamedTuple):
    """What a kernel is written with.

    Attributes:
        tl: the module ``triton.language``.
        jit: ``triton.jit``.
    """

    tl: Any
    jit: Callable[[Callable[..., Any]], Any]


def language() -> Language:
    """Import Triton."""
    if not TRITON:
        # Of the language, the kernels' signatures name a type.
        return Language(SimpleNamespace(constexpr=object), _as_it_is)
    return Language(importlib.import_module("triton.language"), _compiled)


def _as_it_is(function: Callable[..., Any]) -> Any:
    return function


def _compiled(function: Callable[..., Any]) -> Any:
    # Triton reads a function's source and globals: not those of a decorator that checks shapes.
    return importlib.import_module("triton").jit(inspect.unwrap(function))
