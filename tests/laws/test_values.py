"""The right numbers: against the formula written as loops, across dtypes, and by finite differences."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings

from holonomy.layers import GCN, Propagation
from tests.laws.laws import (
    assert_near,
    build,
    cases_where,
    cotangent,
    differentiable,
    every_case,
    gradients,
    leaves,
    output,
    settings_of,
)


@cases_where(lambda case: case.reference is not None)
@given(drawn=settings_of(most_nodes=5))
@settings(max_examples=2)
def test_values_and_every_gradient_agree_with_the_loops(case, drawn, device):
    _, module, inputs = build(case, device, torch.float64, **drawn)
    ours, our_grads = gradients(module, inputs)
    theirs, their_grads = gradients(module, inputs, case.reference)
    assert_near(ours, theirs, 1e-8, "result")
    for name, grad in their_grads.items():
        assert_near(our_grads[name], grad, 1e-6, name)


@every_case
@given(drawn=settings_of())
@settings(max_examples=3)
def test_float32_agrees_with_float64(case, drawn, device):
    _, module, inputs = build(case, device, torch.float32, **drawn)
    wide = copy.deepcopy(module).double()
    narrow_result, narrow_grads = gradients(module, inputs)
    wide_result, wide_grads = gradients(wide, tuple(x.double() if x.is_floating_point() else x for x in inputs))
    assert narrow_result.dtype == torch.float32
    assert_near(narrow_result, wide_result, 2e-4, "result")
    largest = max((grad.double().norm().item() for grad in wide_grads.values()), default=0.0)
    for name, grad in wide_grads.items():
        # A gradient that is all cancellation is compared with the largest of the gradients.
        error = (narrow_grads[name].double() - grad).norm().item()
        # Logits of the squared Lorentzian distance are differences of numbers of size |x|^2, as its docstring says.
        allowed, floor = (2e-2, 5e-2) if "lorentz_squared" in case.name else (2e-3, 1e-3)
        assert error <= allowed * max(grad.norm().item(), floor * largest), f"{name}: off by {error:.1e}"


@cases_where(lambda case: case.true_gradient)
def test_gradcheck(case, device):
    _, module, inputs = build(case, device, torch.float64, nodes=3)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    values = [p.detach().clone().requires_grad_() for p in named.values()]
    inputs = differentiable(inputs)

    def function(*tensors):
        given_inputs, parameters = tensors[: len(inputs)], tensors[len(inputs) :]
        return torch.func.functional_call(module, dict(zip(named, parameters, strict=True)), given_inputs)

    # A random direction for each input: the whole Jacobian of a model would take minutes.
    assert torch.autograd.gradcheck(function, (*inputs, *values), atol=1e-6, rtol=1e-4, fast_mode=True)


@every_case
def test_every_learnable_parameter_receives_a_gradient(case, device):
    # Enough channels that some row of queries has two positive ones: the gradient of a single one is zero.
    _, module, inputs = build(case, device, torch.float64, nodes=9, features=12)
    for training in (True, False):
        module.train(training)
        result = output(module, inputs)
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        # A generic function of the result: a plain sum may be constant by symmetry.
        loss = (result * torch.linspace(0.5, 2.0, result.numel(), dtype=result.dtype).reshape(result.shape)).sin().sum()
        for name, grad in zip(
            named, torch.autograd.grad(loss, list(named.values()), allow_unused=True) if named else (), strict=True
        ):
            assert grad is not None, name
            assert grad.abs().max() > 0, name


@every_case
def test_forward_mode_agrees_with_backward_mode(case, device):
    """The derivative along a random direction, of inputs and parameters together, by both modes.

    Products with sparse matrices, which graph convolutions are, torch has under no transformation of ``torch.func``.
    """
    _, module, inputs = build(case, device, torch.float64)
    result, grads = gradients(module, inputs)
    named = leaves(module, differentiable(inputs))
    tangents = {name: torch.randn_like(x) for name, x in named.items()}
    # Dual tensors live on no Parameter, and a manifold's point is one.
    plain = {name: x.detach().as_subclass(torch.Tensor) for name, x in named.items()}

    def call(named):
        filled = tuple(named.get(f"input {i}", x) for i, x in enumerate(inputs))
        torch.manual_seed(1)
        return torch.func.functional_call(module, {n: x for n, x in named.items() if n in grads}, filled)

    if any(isinstance(part, (GCN, Propagation)) for part in module.modules()):
        with pytest.raises(RuntimeError, match="Sparse CSR"):
            torch.func.jvp(call, (plain,), (tangents,))
        return
    value, pushed = torch.func.jvp(call, (plain,), (tangents,))
    assert_near(value, result, 1e-10, "result")
    pulled = sum((grads[name] * tangents[name]).sum() for name in named)
    assert_near((cotangent(result) * pushed).sum(), pulled, 1e-8, "derivative")
