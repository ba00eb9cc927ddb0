"""The right numbers: against the formula written as loops in both modes, across dtypes, and by forward mode."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import Tensor

from holonomy import layers
from tests.laws.dropout import decided_dropout
from tests.laws.laws import (
    assert_near,
    build,
    cases_where,
    changes_in_training,
    cotangent,
    differentiable,
    drawn_settings,
    every_case,
    gradients,
    leaves,
    manifolds_of,
    modes,
    module_of,
    norms_of,
    output,
)


@cases_where(lambda case: case.reference is not None)
@drawn_settings(2, most_nodes=5)
def test_values_and_every_gradient_agree_with_the_loops(case, drawn, device):
    """In training, too, where the loops drop what the layer drops."""
    _, module, inputs = build(case, device, torch.float64, **drawn)
    for mode in modes(case, module):
        with decided_dropout() if mode.training else nullcontext():
            ours, our_grads = gradients(mode, inputs)
            theirs, their_grads = gradients(mode, inputs, case.reference)
        assert_near(ours, theirs, 1e-8, "result")
        # A gradient that cancels to rounding is measured by the largest of all.
        floor = 1e-3 * max((grad.norm().item() for grad in their_grads.values()), default=0.0)
        for name, grad in their_grads.items():
            assert_near(our_grads[name], grad, 1e-6, name, floor=floor)


@every_case
def test_training_mode_changes_nothing_else(case, device):
    """Only dropout and the statistics of a batch tell the modes apart."""
    _, module, inputs = build(case, device, torch.float64)
    modes_of = (copy.deepcopy(module).train(training) for training in (True, False))
    (training, slopes), (evaluation, expected) = (gradients(mode, inputs) for mode in modes_of)
    if changes_in_training(case, module):
        assert not torch.equal(training, evaluation)
    else:
        assert torch.equal(training, evaluation)
        assert all(torch.equal(slopes[name], grad) for name, grad in expected.items())


@cases_where(lambda case: bool(norms_of(module_of(case))))
def test_running_statistics_are_drawn_towards_those_of_the_batch(case, device):
    _, module, inputs = build(case, device, torch.float64)
    before, seen = copy.deepcopy(module), {}
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args))
    output(module.train(), inputs)
    old, new = dict(before.named_modules()), dict(module.named_modules())
    for name in (name for name, part in new.items() if part in norms_of(module)):
        x, mask = (*seen[name], None)[:2]
        rows = x.reshape(-1, x.shape[-1]) if mask is None else x[mask]
        rate = old[name].momentum
        mean, variance = sum(rows) / len(rows), sum((rows - rows.mean(0)) ** 2) / (len(rows) - 1)
        assert_near(new[name].running_mean, (1 - rate) * old[name].running_mean + rate * mean, 1e-10, name)
        assert_near(new[name].running_var, (1 - rate) * old[name].running_var + rate * variance, 1e-10, name)
        assert new[name].num_batches_tracked == old[name].num_batches_tracked + 1


@every_case
@drawn_settings(3)
def test_float32_agrees_with_float64(case, drawn, device):
    # Logits of the squared Lorentzian distance are differences of numbers of size |x|^2, as its docstring says. Those
    # of tuples are products of three numbers, each of which a change of curvature makes larger: weights have the
    # rounding of logits, and gradients, which are differences of weights, some hundred times that.
    cancels = any(getattr(part, "similarity", None) == "lorentz_squared" for part in module_of(case).modules())
    large = manifolds_of(module_of(case)) and not case.any_radius
    moderate = {"curvatures": (-1.0, -0.3, -2.5)} if cancels or large else {}
    moderate |= {"radius": 0.3} if large else {}
    _, module, inputs = build(case, device, torch.float32, **drawn, **moderate)
    wide = copy.deepcopy(module).double()
    narrow_result, narrow_grads = gradients(module, inputs)
    wide_result, wide_grads = gradients(wide, tuple(x.double() if x.is_floating_point() else x for x in inputs))
    assert narrow_result.dtype == torch.float32
    assert_near(narrow_result, wide_result, 2e-4, "result")
    largest = max((grad.double().norm().item() for grad in wide_grads.values()), default=0.0)
    # A gradient that is all cancellation is compared with the largest of the gradients.
    allowed, floor = (2e-2, 5e-2) if cancels else (2e-3, 1e-2)
    for name, grad in wide_grads.items():
        error = (narrow_grads[name].double() - grad).norm().item()
        assert error <= allowed * max(grad.norm().item(), floor * largest), f"{name}: off by {error:.1e}"


# What the result does not depend on: curvatures that cancel, and a pair's query where three nodes leave it one key.
NOT_MOVING = {
    "HGCN[conv=hgcn]": {"convolutions.1.manifold_out.curvature_parameter.log_ratio"},
    "HGCN[conv=lgcn, linear=tangent]": {"convolutions.0.manifold_in.curvature_parameter.log_ratio"},
    "HigherOrderAttention[kernel=performer, random_features=3, 1 -> 2]": {
        "query.order01.weight",
        "query.order01.bias",
    },
    "HigherOrderTransformer[heads=1, kernel=performer, feedforward=3, 1 -> 2]": {
        "inner.layers.0.attention.query.order01.weight",
        "inner.layers.0.attention.query.order01.bias",
    },
}


@every_case
def test_every_learnable_parameter_receives_a_gradient(case, device):
    """More than rounding leaves of zero, in one of the modes and at one of a few draws."""
    unmoved, stuck = None, NOT_MOVING.get(case.name, set())
    for seed in range(4):
        # Enough channels that some row of queries has two positive ones: the gradient of a single one is zero.
        _, module, inputs = build(case, device, torch.float64, seed, nodes=9, features=12)
        for mode in modes(case, module):
            result = output(mode, inputs)
            named = {name: p for name, p in mode.named_parameters() if p.requires_grad}
            # A generic function of the result: a plain sum may be constant by symmetry.
            weights = torch.linspace(0.5, 2.0, result.numel(), dtype=result.dtype, device=device).reshape(result.shape)
            wanted = list(named.values())
            grads = torch.autograd.grad((result * weights).sin().sum(), wanted, allow_unused=True) if wanted else ()
            assert all(grad is not None for grad in grads)
            sizes = {name: grad.abs().max() for name, grad in zip(named, grads, strict=True)}
            zero = {name for name, size in sizes.items() if size <= 1e-9 * max(sizes.values())}
            unmoved = zero if unmoved is None else unmoved & zero
        if unmoved <= stuck:
            break
    assert unmoved == stuck


@every_case
def test_forward_mode_agrees_with_backward_mode(case, device):
    """The derivative along a random direction, of inputs and parameters together, by both modes."""
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

    value, pushed = torch.func.jvp(call, (plain,), (tangents,))
    assert_near(value, result, 1e-10, "result")
    pulled = sum((grads[name] * tangents[name]).sum() for name in named)
    assert_near((cotangent(result) * pushed).sum(), pulled, 1e-8, "derivative")


def straight_through(case):
    """Whether a gradient is stated, not derived: that of the scores by which tokens are chosen."""
    return any(isinstance(part, layers.PathRouter) for part in module_of(case).modules())


@cases_where(lambda case: not straight_through(case))
def test_second_derivatives_agree_with_differences_of_the_first(case, device):
    """Along a random direction, of a module as it was made, whose biases are zero; the first are what they were."""
    setting, _, inputs = build(case, device, torch.float64)
    module, inputs = case.make(setting, case.options).to(device).eval(), differentiable(inputs)
    named = {name: x for name, x in leaves(module, inputs).items() if x.numel()}
    along = [torch.randn_like(x.detach().as_subclass(torch.Tensor)) for x in named.values()]

    def slope(*, again: bool) -> Tensor:
        torch.manual_seed(1)
        result = module(*inputs)
        total = (result * cotangent(result)).sum()
        grads = torch.autograd.grad(total, list(named.values()), create_graph=again, materialize_grads=True)
        return torch.stack([(grad * cotangent(grad)).sum() for grad in grads]).sum()

    first = slope(again=True)
    floor = first.abs().item()
    assert_near(first, slope(again=False), 1e-9, "first derivative", floor=floor)
    second = torch.autograd.grad(first, list(named.values()), materialize_grads=True) if first.requires_grad else ()
    ours = sum(((grad * direction).sum() for grad, direction in zip(second, along, strict=False)), torch.zeros(()))
    ends = []
    for step in (1e-6, -2e-6):
        for x, direction in zip(named.values(), along, strict=True):
            x.data += step * direction
        ends.append(slope(again=False))
    assert_near(ours, (ends[0] - ends[1]) / 2e-6, 1e-3, "second derivative", floor=1e-3 * floor)
