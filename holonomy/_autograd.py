"""Gradients written by hand: when they may replace those of a reference, and how they are called.

Most fast forms of this library are autograd Functions beside a reference of the same signature. One rule,
:func:`supports_custom_backward`, says when such a form runs; :func:`apply_function` calls it, and gives it forward
mode; :func:`reference_gradients` differentiates the reference in its place, where a gradient is itself to be
differentiated or rows lie where the direct formulas lose digits. What such a form must know of torch's modes stands
here, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager(function: _Function) -> _Function:
    """The same function, which ``torch.compile`` does not trace: shapes depend on numbers, or it is not of torch."""
    # The graph breaks there; with ``fullgraph=True`` torch says so. Torch's own decorator imports the compiler, which
    # takes seconds, when it is applied; this one does so when a compiled function calls it.

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType]
        return function(*args, **kwargs)

    return cast("_Function", call)


def apply_function(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """``function.apply(*inputs)``, which torch does not type, with the signature that it reads at every call kept."""
    forward: Any = function.forward
    if not torch.compiler.is_compiling():
        if not hasattr(forward, "__signature__"):
            forward.__signature__ = inspect.signature(forward)
        if forward_mode() and not _states_forward_mode(function):
            return apply_function(_Pushed, function, *inputs)
    call: Callable[..., Any] = function.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return call(*inputs)


class InputsSaved(torch.autograd.Function):
    """A function whose backward pass reads its inputs, all of them tensors."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the inputs."""
        del output
        ctx.save_for_backward(*inputs)


def traceable(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """:func:`apply_function` of a class; compiled, in the older form, which ``torch.func`` does not take."""

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            output = function.forward(*inputs)
            function.setup_context(ctx, inputs, output)
            return output

        backward = staticmethod(function.backward)

    def call(*inputs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return apply_function(function, *inputs)
        # Where nothing records, dynamo takes no Function in another, and calls one of two inputs without context.
        recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return apply_function(Traced, *inputs) if recorded else function.forward(*inputs)

    return call


class _Pushed(torch.autograd.Function):
    """Forward mode of a function that states its gradient only: tangents through the gradient's transpose."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Any, *inputs: Any) -> Tensor:
        return function.forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function, *rest = inputs
        ctx.others = [None if isinstance(x, Tensor) else x for x in rest]
        tensors = [x for x in (*rest, output) if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_stated(ctx)(grad_outputs[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        *tensors, output = ctx.saved_tensors
        stated = _stated(ctx)

        def pull(grad: Tensor) -> tuple[Tensor, ...]:
            return tuple(x for x in stated(grad) if x is not None)

        push = torch.func.vjp(pull, torch.zeros_like(output))[1]
        given = (along for along, other in zip(tangents[1:], ctx.others, strict=True) if other is None)
        filled = (torch.zeros_like(x) if along is None else along for x, along in zip(tensors, given, strict=True))
        return push(tuple(filled))[0]


def _stated(ctx: Any) -> Callable[[Tensor], tuple[Tensor | None, ...]]:
    """The gradient that the function of a context of :class:`_Pushed` states, by that of its result."""
    *tensors, output = ctx.saved_tensors
    found = iter(tensors)
    inputs = tuple(next(found) if other is None else other for other in ctx.others)
    its_own = _Context(tuple(other is None for other in ctx.others))
    ctx.function.setup_context(its_own, inputs, output)
    return lambda grad: ctx.function.backward(its_own, grad)


class _Context:
    """What the ``setup_context`` and ``backward`` of a function expect of torch."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _states_forward_mode(function: type[torch.autograd.Function]) -> bool:
    # A function of the older form, whose forward takes the context, is left to say that it has none.
    older = function.setup_context is torch.autograd.Function.setup_context
    return older or function.jvp is not torch.autograd.Function.jvp


def supports_custom_backward(*tensors: Tensor) -> bool:
    """Whether a form with gradients written by hand may run in place of the reference of the same signature."""
    return (
        not torch.compiler.is_compiling()
        and not transformed()
        and not tensors[0].is_meta  # which holds no numbers to read
        and not torch.is_autocast_enabled(tensors[0].device.type)
        and {x.dtype for x in tensors} in ({torch.float32}, {torch.float64})
    )


def may_bypass(module: object, kind: type[nn.Module]) -> bool:
    """Whether a fast form may read the parameters of a module: not with hooks, nor of another class, as adapters."""
    return type(module) is kind and "forward" not in module.__dict__ and not any(getattr(module, x) for x in _HOOKS)


def transformed() -> bool:
    """Whether forward mode, ``torch.func``, a fake mode or ``make_fx`` is at work, where no number can be read back."""
    return forward_mode() or torch._C._are_functorch_transforms_active() or traced()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def traced() -> bool:
    """Whether tensors are fake, without numbers, or recorded by ``make_fx``."""
    return watched() and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


@contextmanager
def kept() -> Generator[None]:
    """Where what is computed once is made: for training, too, and out of sight of the modes of torch that replay."""
    with _disable_current_modes(), torch.inference_mode(mode=False), torch.no_grad():
        yield


def watched() -> bool:
    """Whether a mode of torch sees every operation, as a selective checkpoint, which replays them and keeps results."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def forward_mode() -> bool:
    """Whether derivatives are being pushed forward."""
    return forward_ad._current_level >= 0  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def as_array(x: Tensor) -> np.ndarray:
    """Integers for NumPy, also where a transformation of ``torch.func`` hides the memory of every tensor."""
    if transformed():
        # Not tolist, which torch 2.6 refuses there.
        return np.array([int(entry) for entry in x.flatten()], dtype=np.int64).reshape(x.shape)
    return x.detach().cpu().numpy()


def autocast_device(x: Tensor) -> str:
    """The kind of device under whose autocast a tensor is computed with: what to switch off where digits are needed."""
    return "cpu" if x.is_meta else x.device.type


def batched(grad: Tensor) -> bool:
    """Whether these are many, of ``torch.autograd.grad(is_grads_batched=True)``: they are written into no table."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(grad)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def through_reference(grad: Tensor) -> bool:
    """Whether the way back differentiates the reference: where it is to be differentiated itself, or for a batch."""
    return torch.is_grad_enabled() or batched(grad)


def recomputed(function: Callable[..., tuple[Tensor, ...]], *inputs: Any) -> tuple[Tensor, ...]:
    """``function(*inputs)`` outside of autocast, computed again in the backward pass, which keeps the inputs only."""
    return apply_function(_Recomputed, function, *inputs)


class _Recomputed(torch.autograd.Function):
    # Without the hooks on every saved tensor, by which torch's checkpoint takes a tenth more of the time.

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *inputs: Any) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        # What is computed again has to be what was: outside of autocast, which may be on where gradients are asked for.
        with torch.autocast(autocast_device(grad_outputs[0]), enabled=False):
            return None, *reference_gradients(ctx.function, ctx.saved_tensors, grad_outputs, ctx.needs_input_grad[1:])


def reference_gradients(
    reference: Callable[..., Any], inputs: tuple[Any, ...], grad: Any, wanted: tuple[bool, ...]
) -> tuple[Any, ...]:
    """Gradients of another function of the same inputs; differentiable again where autograd is recording."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: where one input was computed from another, the path between them is not of this function.
        inputs = tuple(
            (x.view_as(x) if again else x.detach().requires_grad_()) if w else x
            for x, w in zip(inputs, wanted, strict=True)
        )
        chosen = [x for x, asked in zip(inputs, wanted, strict=True) if asked]
        made = reference(*inputs)
        if not isinstance(made, Tensor):  # but several, of which some may be constants
            made, grad = zip(*((x, g) for x, g in zip(made, grad, strict=True) if x.requires_grad), strict=True)
        grads = iter(torch.autograd.grad(made, chosen, grad, create_graph=again, materialize_grads=True))
    return tuple(next(grads) if asked else None for asked in wanted)
