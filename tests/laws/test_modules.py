"""Modules behave as modules of torch do: saved, copied, moved, compiled, seeded, permuted, padded."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from geoopt import ManifoldParameter
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from holonomy import models
from holonomy.manifolds import Curvature
from tests.cases import CASES
from tests.laws.laws import (
    assert_near,
    build,
    cases_where,
    cotangent,
    differentiable,
    drawn_settings,
    every_case,
    gradients,
    in_chunks,
    leaves,
    manifolds_of,
    mask_of,
    modes,
    module_of,
    named,
    node_axes,
    output,
    padding_in,
    result_axes,
    richest_of_its_class,
)

pytestmark = pytest.mark.usefixtures("without_shape_checks")  # tests/laws/test_values.py runs with them

# Arguments whose values are the numbers of nodes.
NUMBERS = ("edge_index", "indices")


def kept_options(case, module):
    """The options of a case that parts of its module have as attributes, with all their values."""
    parts = list(module.modules())
    found = {
        name: [getattr(part, name) for part in parts if type(getattr(part, name, None)) is type(value)]
        for name, value in case.options.items()
        if value is not None and not (isinstance(value, float) and "dropout" in name)  # handed to the loops by the case
    }
    return {name: values for name, values in found.items() if values}


@cases_where(lambda case: bool(kept_options(case, module_of(case))))
def test_options_are_kept(case, device):
    """Loops read an option from the module: one that the constructor lost would be lost to both."""
    kept = kept_options(case, build(case, device, torch.float64)[1])
    for name in kept_options(case, module_of(case)):
        assert case.options[name] in kept.get(name, ()), name


@every_case
def test_state_dict_round_trip(case, device):
    _, module, inputs = build(case, device, torch.float64, seed=0)
    _, other, _ = build(case, device, torch.float64, seed=7)
    other.load_state_dict(copy.deepcopy(module.state_dict()))
    assert torch.equal(output(module, inputs), output(other, inputs))


@every_case
def test_deepcopy(case, device):
    _, module, inputs = build(case, device, torch.float64)
    twin = copy.deepcopy(module)
    assert torch.equal(output(module, inputs), output(twin, inputs))
    ours, theirs = dict(module.named_parameters()), dict(twin.named_parameters())
    # named_parameters lists a shared one once: what was shared is shared in the copy, and with nobody else.
    assert ours.keys() == theirs.keys()
    assert not {id(p) for p in ours.values()} & {id(p) for p in theirs.values()}


@every_case
def test_to_dtype(case, device):
    _, module, inputs = build(case, device, torch.float32)
    narrow = output(module, inputs)
    module.to(torch.float64)
    assert {x.dtype for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()} <= {torch.float64}
    wide = output(module, tuple(x.double() if x.is_floating_point() else x for x in inputs))
    assert wide.dtype == torch.float64
    assert_near(narrow, wide, 2e-4, "result")
    assert output(module.to(torch.float32), inputs).dtype == torch.float32


@every_case
def test_the_meta_device_gives_the_shape_of_the_result(case, device):
    """Where torch counts parameters and shapes without computing anything; what needs numbers says so."""
    _, module, inputs = build(case, device, torch.float32)
    expected = output(module, inputs)
    result = module.to("meta")(*(x.to("meta") for x in inputs))
    assert result.is_meta
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)


@every_case
def test_what_was_made_on_the_meta_device_takes_a_state(case, device):
    """Buffers that no state holds came as storage without content: a model gave noise, and no error."""
    _, module, inputs = build(case, device, torch.float64)
    state, expected = copy.deepcopy(module.state_dict()), output(module, inputs)
    for load in (
        lambda other: other.to_empty(device=device).load_state_dict(state),
        lambda other: other.load_state_dict(state, assign=True),
    ):
        other = copy.deepcopy(module).to("meta")
        torch.use_deterministic_algorithms(True)  # then storage without content is nan
        try:
            load(other)
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(output(other, inputs), expected)


@cases_where(lambda case: not any(isinstance(part, Curvature) for part in module_of(case).modules()))
def test_every_module_draws_its_own_parameters_anew(case, device):
    """As torch asks of modules that are made on the meta device, and as one model is trained several times."""
    setting, module, _ = build(case, device, torch.float64)
    again = copy.deepcopy(module).to("meta")
    torch.use_deterministic_algorithms(True)  # then storage without content is nan
    try:
        again.to_empty(device=device)
    finally:
        torch.use_deterministic_algorithms(False)
    again.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
    new = case.make(setting, case.options)
    theirs = dict([*new.named_parameters(), *new.named_buffers()])
    for name, ours in [*again.named_parameters(), *again.named_buffers()]:
        assert ours.isfinite().all(), name
        if theirs[name].numel() > 1 == theirs[name].unique().numel():
            assert torch.equal(ours, theirs[name]), name  # a constant


@every_case
def test_neither_the_default_dtype_nor_the_default_device_is_read(case, device):
    """A tensor is made from a neighbour; torch.set_default_device moves nobody else's. Meta stands in for any other."""
    _, module, inputs = build(case, device, torch.float32)
    dtype = torch.get_default_dtype()
    for mode in modes(case, module):
        twin = copy.deepcopy(mode)
        expected, expected_grads = gradients(mode, inputs)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                result, grads = gradients(twin, inputs)
        finally:
            torch.set_default_dtype(dtype)
        assert torch.equal(result, expected)
        for name, grad in expected_grads.items():
            assert torch.equal(grads[name], grad), name
        for name, value in mode.state_dict().items():
            assert torch.equal(twin.state_dict()[name], value), name


def first_of_its_class(case):
    return case is next(other for other in CASES if other.kind is case.kind and richest_of_its_class(other))


def first_of_a_hyperbolic_class(case):
    return first_of_its_class(case) and bool(manifolds_of(module_of(case)))


@pytest.mark.slow
@pytest.mark.usefixtures("without_decorators")
@cases_where(lambda case: richest_of_its_class(case) and not first_of_a_hyperbolic_class(case))
def test_compiles_without_a_graph_break(case, device):
    """One case of each class, for each takes seconds; of a hyperbolic class the first is left to the next law."""
    compiles(case, device, dynamic=None)


each_hyperbolic_class = cases_where(first_of_a_hyperbolic_class)


@pytest.mark.slow
@pytest.mark.usefixtures("without_decorators")
@each_hyperbolic_class
def test_compiles_for_all_sizes(case, device):
    """Floating-point numbers that a module or the library keeps under a name are symbols then, too."""
    compiles(case, device, dynamic=True)


@pytest.mark.slow
@pytest.mark.usefixtures("without_decorators")
@each_hyperbolic_class
def test_compiles_where_nothing_asks_for_a_gradient(case, device):
    """Nor does a frozen hyperbolic module break the graph, of the sizes it is called with, with gradients enabled."""
    _, module, inputs = build(case, device, torch.float64)
    module.requires_grad_(requires_grad=False)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    if unreadable(module):
        refused(lambda: output(compiled, inputs))
    else:
        torch.testing.assert_close(output(compiled, inputs), output(module, inputs))


def unreadable(module):
    """Whether dynamo takes parameters for objects of unknown kind, as that of PyTorch 2.6 does with Geoopt's."""
    return torch.__version__.startswith("2.6.") and any(isinstance(p, ManifoldParameter) for p in module.parameters())


def refused(call):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ManifoldParameter|GetAttrVariable|torch_function"):
        call()


def compiles(case, device, *, dynamic):
    """One case of a layer is compiled down to operators.

    Models are made of layers; test_graphs.py has some of them down to operators.
    """
    _, module, inputs = build(case, device, torch.float64)
    torch.compiler.reset()
    lowered = first_of_its_class(case) and case.kind.__name__ not in models.__all__
    backend = "aot_eager" if lowered else "eager"
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
    eager_result, eager_grads = gradients(module, inputs)
    if unreadable(module):
        refused(lambda: gradients(compiled, inputs))
        return
    result, grads = gradients(compiled, inputs)
    assert_near(result, eager_result, 1e-10, "result")
    # A gradient that cancels to rounding (queries with one live channel) is measured by the largest of all.
    floor = 1e-6 * max((grad.norm().item() for grad in eager_grads.values()), default=0.0)
    for name, grad in eager_grads.items():
        ours = grads[f"_orig_mod.{name}" if f"_orig_mod.{name}" in grads else name]
        assert_near(ours, grad, 1e-8, name, floor=floor)


@every_case
def test_checkpointing_changes_no_gradient(case, device, monkeypatch):
    """Under torch.utils.checkpoint, which computes again what was saved and gives each tensor once."""
    in_chunks(monkeypatch)
    _, module, inputs = build(case, device, torch.float32)
    for mode in modes(case, module):
        expected, expected_grads = gradients(mode, inputs)
        result, grads = gradients(mode, inputs, partial(checkpoint, use_reentrant=False))
        assert torch.equal(result, expected)
        for name, grad in expected_grads.items():
            assert torch.equal(grads[name], grad), name


@cases_where(richest_of_its_class)
def test_a_selective_checkpoint_changes_no_gradient(case, device, monkeypatch):
    """It keeps products and replays the rest: a product that was written over was a wrong gradient, and no error."""
    in_chunks(monkeypatch)
    _, module, inputs = build(case, device, torch.float64)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    _, expected = gradients(module, inputs)
    _, grads = gradients(module, inputs, partial(checkpoint, use_reentrant=False, context_fn=contexts))
    for name, grad in expected.items():
        assert_near(grads[name], grad, 1e-8, name)


@cases_where(richest_of_its_class)
def test_an_input_may_be_a_parameter(case, device):
    """To the bit: forms that read values took the reference there, which lasts twice as long."""
    _, module, inputs = build(case, device, torch.float32)
    expected, expected_grads = gradients(module, inputs)

    def of_parameters(module, *inputs):
        return module(*(nn.Parameter(x) if x.is_floating_point() else x for x in inputs))

    result, grads = gradients(module, inputs, of_parameters)
    assert torch.equal(result, expected)
    for name in grads.keys() - {f"input {i}" for i in range(len(inputs))}:
        assert torch.equal(grads[name], expected_grads[name]), name


@every_case
def test_what_is_made_in_inference_mode_computes_there(case, device):
    """Its parameters ask for gradients, and nothing computed from them does: hooks were refused there."""
    _, module, inputs = build(case, device, torch.float64)
    expected = output(module, inputs)
    with torch.inference_mode():
        result = output(copy.deepcopy(module), inputs)
    assert_near(result, expected, 1e-12, "result")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@every_case
def test_no_gradient_is_nan_on_the_way(case, device):
    """Not even one that a mask takes away: torch.autograd.detect_anomaly stops there."""
    _, module, inputs = build(case, device, torch.float64)
    with torch.autograd.detect_anomaly():
        gradients(module, inputs)


@every_case
def test_gradients_in_a_batch_are_those_one_by_one(case, device, monkeypatch):
    """Of torch.autograd.grad(is_grads_batched=True), as for a Jacobian."""
    in_chunks(monkeypatch)
    _, module, inputs = build(case, device, torch.float32)
    inputs = differentiable(inputs)
    torch.manual_seed(1)
    result, leaf = module(*inputs), list(leaves(module, inputs).values())
    some = torch.stack([cotangent(result), cotangent(result).flip(0)])
    of = partial(torch.autograd.grad, result, leaf, allow_unused=True, retain_graph=True)
    each, batch = [of(one) for one in some], of(some, is_grads_batched=True)
    largest = max((one.norm().item() for one in each[0] if one is not None), default=0.0)
    for one, other, both in zip(*each, batch, strict=True):
        if one is not None:
            assert_near(both, torch.stack([one, other]), 1e-3, "gradient", floor=1e-2 * largest)


@every_case
def test_the_same_seed_gives_the_same_result(case, device, dtype):
    _, module, inputs = build(case, device, dtype)
    first, second = copy.deepcopy(module).train(), copy.deepcopy(module).train()
    assert torch.equal(output(first, inputs, seed=5), output(second, inputs, seed=5))
    if case.random:
        assert not torch.equal(output(first, inputs, seed=5), output(second, inputs, seed=6))


@cases_where(lambda case: any(node_axes(case).values()) and not case.ordered)
@drawn_settings(2)
def test_permuting_the_nodes_permutes_the_result(case, drawn, device):
    """In every argument along every axis of nodes, pairs and tuples too; edges and hyperedges are numbered anew."""
    setting, module, inputs = build(case, device, torch.float64, **drawn)
    order = torch.randperm(setting.nodes, device=device)
    permuted = []
    for (name, x), axes in zip(named(module, inputs).items(), node_axes(case).values(), strict=True):
        permuted.append(order.argsort()[x] if name in NUMBERS else along(x, axes, order))
    expected = output(module, inputs)
    if case.first_node is None:
        expected = along(expected, result_axes(case), order)
    else:
        rows = torch.arange(expected.shape[-2], device=device)
        rows[case.first_node : case.first_node + setting.nodes] = case.first_node + order
        expected = expected[..., rows, :]
    assert_near(output(module, tuple(permuted)), expected, 1e-9, "result")


def along(x, axes, order):
    for axis in axes:
        x = x.index_select(axis, order)
    return x


def emptied(case, inputs):
    """The inputs without nodes, and without the graphs or sequences of a batch, where the first axis is theirs."""
    each = list(zip(inputs, node_axes(case).values(), strict=True))
    yield tuple(x[tuple(slice(0 if axis in axes else None) for axis in range(x.ndim))] for x, axes in each)
    if all(0 not in axes and x.shape[:1] == inputs[0].shape[:1] for x, axes in each):
        yield tuple(x[:0] for x in inputs)


def reached(module, inputs):
    """What a gradient comes to, be it zero, of the parameters and the first input."""
    inputs = differentiable(inputs)
    wanted = leaves(module, inputs)
    names = {name: x for name, x in wanted.items() if name == "input 0" or not name.startswith("input ")}
    result = output(module, inputs)
    if not (names and result.requires_grad):
        return set()
    found = torch.autograd.grad(result, list(names.values()), cotangent(result), allow_unused=True)
    return {name for name, grad in zip(names, found, strict=True) if grad is not None}


@cases_where(lambda case: any(node_axes(case).values()) and not node_axes(case).keys() & set(NUMBERS))
def test_no_nodes_and_no_graphs_have_a_finite_result_with_gradients(case, device):
    """So that a loop over batches, one of which is empty, needs no case of its own, nor do processes that share one.

    ``DistributedDataParallel`` waits for the gradient of every parameter.
    """
    _, module, inputs = build(case, device, torch.float64)
    for empty in emptied(case, inputs):
        for mode in modes(case, module):
            result, grads = gradients(mode, empty)
            assert result.isfinite().all()
            assert reached(mode, empty) >= reached(mode, inputs)
            assert all(grad.isfinite().all() for grad in grads.values())


@cases_where(lambda case: mask_of(case) is not None)
@drawn_settings(2)
def test_padding_has_no_effect(case, drawn, device):
    """Whatever stands where a node, or one of a pair or tuple, is padding: numbers, infinities, nan, other codes."""
    _, module, inputs = build(case, device, torch.float64, **drawn)
    padding = padding_in(case, module, inputs)
    arguments = zip(named(module, inputs).items(), node_axes(case).values(), strict=True)
    hidden = [axes if name != mask_of(case) else () for (name, _), axes in arguments]
    for mode in modes(case, module):
        expected = output(mode, inputs)
        there = ~spread(padding, expected, result_axes(case))
        for filling in (0.0, 1e30, float("inf"), float("nan")):
            spoiled = tuple(
                torch.where(spread(padding, x, axes), at_padding(x, filling), x)
                for x, axes in zip(inputs, hidden, strict=True)
            )
            ours = output(mode, spoiled)
            assert torch.equal(ours[there], expected[there])
            assert ours.isfinite().all()


def at_padding(x, filling):
    """The filling, for codes and truth values the least or the largest that there is."""
    if x.is_floating_point():
        return torch.full_like(x, filling)
    return x.amin().expand_as(x) if filling == 0.0 else x.amax().expand_as(x)


def spread(padding, x, axes):
    """Which entries of a tensor, whose first axis is the graphs, belong to a node that is padding."""
    hidden = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    for axis in axes:
        shape = [len(padding) if a == 0 else padding.shape[1] if a == axis else 1 for a in range(x.ndim)]
        hidden = hidden | padding.reshape(shape)
    return hidden


@every_case
def test_bfloat16_autocast_stays_finite(case, device):
    _, module, inputs = build(case, device, torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        result = output(module, inputs)
    assert result.isfinite().all()
    assert_near(result, output(module, inputs), 0.2, "result")


@every_case
def test_float16_autocast_leaves_gradients_their_digits(case, device):
    """Relative to the gradient, or to a fifth of the largest; an activation with a kink may turn on the other side."""
    _, module, inputs = build(case, device, torch.float32)
    module.eval()

    def under_autocast(module, *inputs):
        with torch.autocast(device.type, torch.float16):
            return module(*inputs).float()

    result, grads = gradients(module, inputs)
    ours, our_grads = gradients(module, inputs, under_autocast)
    assert_near(ours, result, 1e-2, "result")
    floor = 0.2 * max((grad.norm().item() for grad in grads.values()), default=0.0)
    for name, grad in grads.items():
        assert_near(our_grads[name], grad, 0.4, name, floor=floor)
