"""Which tensors the Triton kernels support, and Triton's language for the modules that define kernels.

Kernels run on CUDA tensors of at most 32 bits where Triton 3.6 or newer is installed (torch's wheel for GPUs includes
it) and the kernel supports the form. Elsewhere the reference or the chunked form runs. Triton is imported when a kernel
first runs.
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


def _installed() -> bool:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (3, 6)


TRITON = _installed()
"""Whether Triton is installed, in a version that the kernels were compiled with."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports_triton(*tensors: Tensor) -> bool:
    """Whether Triton kernels run on these tensors."""
    return TRITON and all(tensor.is_cuda and tensor.dtype in _DTYPES for tensor in tensors)


class Language(NamedTuple):
    """The modules and functions that a kernel is written with."""

    tl: Any  # the module triton.language
    jit: Callable[[Callable[..., Any]], Any]  # triton.jit


def language() -> Language:
    """Import Triton."""
    if not TRITON:
        # Signatures of kernels name a type of the language.
        return Language(SimpleNamespace(constexpr=object), _as_it_is)
    return Language(importlib.import_module("triton.language"), _compiled)


def _as_it_is(function: Callable[..., Any]) -> Any:
    return function


def _compiled(function: Callable[..., Any]) -> Any:
    # Triton reads the source and globals of the function itself, not of a decorator around it.
    return importlib.import_module("triton").jit(inspect.unwrap(function))
