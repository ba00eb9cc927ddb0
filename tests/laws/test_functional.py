"""Modules as functions of their tensors: ``torch.func.functional_call`` and the transformations of it."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from holonomy import layers, models
from tests.laws.laws import (
    assert_near,
    build,
    cases_where,
    cotangent,
    every_case,
    gradients,
    module_of,
    output,
    richest_of_its_class,
)
from tests.registry.graphs import OF_GRAPHS, OF_HYPEREDGES, drawn_graph, drawn_hyperedges, made

pytestmark = pytest.mark.usefixtures("without_shape_checks")  # tests/laws/test_values.py runs with them


def tensors_of(module):
    """Parameters and buffers, each under its first name."""
    return dict([*module.named_parameters(), *module.named_buffers()])


def other_values(module, factor=1.25):
    """Parameters times a factor, and buffers."""
    changed = {name: factor * x.detach().as_subclass(torch.Tensor) for name, x in module.named_parameters()}
    return changed | {name: x.clone() for name, x in module.named_buffers()}


def loaded(module, values):
    """A copy that holds values."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for name, x in tensors_of(twin).items():
            x.copy_(values[name])
    return twin


def called(module, values, inputs):
    torch.manual_seed(1)
    return torch.func.functional_call(module, dict(values), inputs)


@every_case
def test_functional_call_computes_with_other_values_and_leaves_the_module_as_it_was(case, device):
    _, module, inputs = build(case, device, torch.float64)
    for training in (False, True):
        module.train(training)
        held, before, values = tensors_of(module), copy.deepcopy(module.state_dict()), other_values(module)
        expected = output(loaded(module, values), inputs)
        # To rounding: some processors sum in another order where values need no gradient.
        torch.testing.assert_close(called(module, values, inputs), expected.detach(), rtol=1e-12, atol=1e-12)
        assert all(x is held[name] for name, x in tensors_of(module).items())
        assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
        assert all(isinstance(x, nn.Parameter) for x in module.parameters())


@cases_where(lambda case: len(module_of(case).state_dict()) > len(tensors_of(module_of(case))))
def test_a_shared_curvature_is_refused_under_two_names(case, device):
    """As ``state_dict`` has it, and torch would restore it wrongly; the module is as it was."""
    _, module, inputs = build(case, device, torch.float64)
    held = tensors_of(module)
    with pytest.raises(ValueError, match=r"under one name, that of named_parameters"):
        torch.func.functional_call(module, module.state_dict(), inputs)
    assert all(x is held[name] for name, x in tensors_of(module).items())


@cases_where(richest_of_its_class)
def test_grad_agrees_with_autograd(case, device):
    _, module, inputs = build(case, device, torch.float64)
    result, expected = gradients(module, inputs)
    values = {name: x.detach().as_subclass(torch.Tensor) for name, x in module.named_parameters()}
    grads = torch.func.grad(lambda values: (called(module, values, inputs) * cotangent(result)).sum())(values)
    for name in grads.keys() & expected.keys():
        assert_near(grads[name], expected[name], 1e-8, name)


@cases_where(richest_of_its_class)
def test_fake_tensors_have_the_shape_of_the_result(case, device):
    """With which memory is foreseen before it is needed."""
    _, module, inputs = build(case, device, torch.float32)
    expected = output(module, inputs)
    with FakeTensorMode() as mode:
        values = {name: mode.from_tensor(x) for name, x in tensors_of(module).items()}
        result = called(module, values, tuple(map(mode.from_tensor, inputs)))
    assert (result.shape, result.dtype, result.device) == (expected.shape, expected.dtype, expected.device)


@cases_where(lambda case: richest_of_its_class(case) and case.kind.__name__ not in models.__all__)
def test_recorded_operations_are_the_module(case, device):
    _, module, inputs = build(case, device, torch.float64)
    torch.manual_seed(1)
    recorded = make_fx(module)(*inputs)
    assert_near(recorded(*inputs), output(module, inputs), 1e-8, "result")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which torch reads
@cases_where(
    lambda case: (
        richest_of_its_class(case) and case.kind.__name__ not in {*models.__all__, layers.ProductAttention.__name__}
    )
)
def test_operations_are_recorded_where_sizes_are_symbols(case, device):
    """A symbol has no hash. Attention on a product is made of the others, and takes three times their time."""
    _, module, inputs = build(case, device, torch.float64)
    torch.manual_seed(1)
    recorded = make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    assert_near(recorded(*inputs), output(module, inputs), 1e-8, "result")


# torch has no batching rule for its own attention on a CPU, and loops.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@cases_where(lambda case: richest_of_its_class(case) and bool(tensors_of(module_of(case))))
def test_an_ensemble_by_vmap_agrees_with_its_members(case, device):
    _, module, inputs = build(case, device, torch.float64)
    members = [other_values(module, factor) for factor in (1.0, 1.25)]
    stacked = {name: torch.stack([values[name] for values in members]) for name in members[0]}
    results = torch.func.vmap(lambda values: called(module, values, inputs))(stacked)
    for values, result in zip(members, results, strict=True):
        assert_near(result, called(module, values, inputs), 1e-10, "member")


every_graph_and_hyperedge = pytest.mark.parametrize(
    "name", [*OF_GRAPHS, *(f"of hyperedges: {name}" for name in OF_HYPEREDGES)]
)


def of_features(name):
    """Features, and a function of them that calls a module with a graph or with hyperedges that nobody has seen."""
    module = made(name, dtype=torch.float64)
    if name in OF_GRAPHS:
        given = drawn_graph(4, nodes=8, dtype=torch.float64).arguments(name)
        x, rest = given.pop("x"), given
    else:
        edges = drawn_hyperedges(4, dtype=torch.float64)
        x, rest = edges.values, {}

    def result(x):
        y = module(x if name in OF_GRAPHS else edges.with_values(x), **rest)
        return y if isinstance(y, torch.Tensor) else y.values

    return x, result


@every_graph_and_hyperedge
def test_a_selective_checkpoint_does_not_see_what_is_remembered(name):
    """It replays each operation of the first pass, also of one that sorted a graph, which the second does not do."""
    x, result = of_features(name)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    x.requires_grad_()
    replayed = checkpoint(result, x, use_reentrant=False, context_fn=contexts).sin().sum()
    ours, expected = (torch.autograd.grad(y, x)[0] for y in (replayed, result(x).sin().sum()))
    assert_near(ours, expected, 1e-8, "gradient")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_graph_and_hyperedge
def test_transformations_take_what_is_called_with_graphs_and_hyperedges(name):
    x, result = of_features(name)
    weights = torch.randn_like(result(x))
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((result(leaf) * weights).sum(), leaf)
    assert_near(torch.func.grad(lambda x: (result(x) * weights).sum())(x), expected, 1e-8, "gradient")
    for member, y in zip((x, 2 * x), torch.func.vmap(result)(torch.stack([x, 2 * x])), strict=True):
        assert_near(y, result(member), 1e-8, "member")


EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 0], [1, 0, 2, 1, 3, 2, 0, 3]])
ENCODINGS = {
    "laplacian_identifiers": lambda: layers.laplacian_identifiers(EDGES, 5, 3, batch=torch.tensor([0, 0, 0, 0, 1])),
    "random_walk_encoding": lambda: layers.random_walk_encoding(EDGES, 5, 3),
    "random_walk_node_encoding": lambda: layers.random_walk_node_encoding(EDGES, 5, 3),
    "shortest_path_encoding": lambda: layers.shortest_path_encoding(EDGES, 5, 3),
    "ring_membership": lambda: layers.ring_membership(EDGES, 5, 4),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_numpy_computes_of_a_graph_is_there_in_a_transformation(name):
    """Models compute it in their forward pass."""
    expected, x = ENCODINGS[name]().double(), torch.ones((), dtype=torch.float64)
    weights = torch.rand(expected.shape, dtype=torch.float64)

    def weighed(x):
        return x * (ENCODINGS[name]().double() * weights).sum()

    for transformation in (torch.func.grad, torch.func.jacfwd):
        assert_near(transformation(weighed)(x), (expected * weights).sum(), 1e-12, "slope")
    assert_near(torch.func.vmap(weighed)(x[None])[0], (expected * weights).sum(), 1e-12, "member")
