"""Submodules are called where the call may be seen or changed: by hooks, adapters and parametrizations."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from holonomy import Lorentz
from holonomy.layers import GCN, HigherOrderAttention, HypLinearAttention
from holonomy.models import Hypformer, HypformerBlock
from holonomy.structures import Hyperedges
from tests.laws.laws import assert_near, build, cases_where, every_case, output, richest_of_its_class

pytestmark = pytest.mark.usefixtures("without_shape_checks")  # tests/laws/test_values.py runs with them


def callable_parts(module):
    """Submodules by name that hold parameters and can be called: all but manifolds and containers."""
    return {
        name: part
        for name, part in module.named_modules()
        if name and type(part).forward is not nn.Module.forward and any(True for _ in part.parameters(recurse=False))
    }


def seen(module, inputs):
    """Names of parts that hooks see called, then of those that are called where each is of another class."""
    parts, by_hook, by_class = callable_parts(module), set(), set()
    kept = [part.register_forward_hook(lambda *_, name=name: by_hook.add(name)) for name, part in parts.items()]
    module(*inputs)
    for handle in kept:
        handle.remove()
    for name, part in parts.items():
        part.__class__ = adapter(type(part), partial(by_class.add, name))
    module(*inputs)
    return set(parts), by_hook, by_class


def adapter(kind, note):
    """A class that computes the same and notes each call."""

    def forward(self, *args, **kwargs):
        note()
        return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


@every_case
def test_hooks_and_adapters_of_every_submodule_are_called(case):
    _, module, inputs = build(case, torch.device("cpu"), torch.float64)
    parts, by_hook, by_class = seen(module.eval(), inputs)
    assert by_hook == parts
    assert by_class == parts


class Wrapped(nn.Module):
    """Another module that calls the first, as adapters of low rank do, and has none of its attributes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.inner(*args, **kwargs)


# Parts of which more is used than a call.
_NOT_ONLY_CALLED = [
    "HypformerEncoder",
    "GraphTokenizer",
    "TokenEmbedding",
    "PairEncoder",
    "EdgeTypeEncoder",
    "RandomWalkEncoder",
    "EdgeProjection",
    "SimplicialEncoderLayer",
    "ExpertChoice",
    "LorentzEmbedding",
    "EquivariantMap",
    "Lorentz",
    "Sphere",
    "Euclidean",
    "Product",
    "Curvature",
    "Identity",
]


def wrapped(module, kind):
    """A copy of a module in which each part of a class is another module that calls it."""
    twin, wrappers = copy.deepcopy(module), []
    for name, part in list(twin.named_modules()):
        if not name or type(part) is not kind:
            continue
        above, _, last = name.rpartition(".")
        holder = twin.get_submodule(above)
        if not type(holder).__module__.startswith("tests."):  # whose calls are of methods
            wrappers.append(Wrapped(part))
            holder._modules[last] = wrappers[-1]
    return twin, wrappers


@cases_where(richest_of_its_class)
def test_another_module_may_stand_in_the_place_of_a_part(case):
    """Such as an adapter, another dropout or another normalisation: a part is called, and its sizes are not read."""
    _, module, inputs = build(case, torch.device("cpu"), torch.float64)
    expected = output(module, inputs)
    kinds = {type(part) for part in module.modules() if type(part).forward is not nn.Module.forward}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        if kind.__name__ not in _NOT_ONLY_CALLED:
            twin, wrappers = wrapped(module, kind)
            assert_near(output(twin, inputs), expected, 1e-9, kind.__name__)
            assert all(wrapper.calls for wrapper in wrappers), kind.__name__


def test_so_are_those_where_rows_are_many():
    """Where forms in chunks, and of all classes at once, would read the weights."""
    x = torch.randn(2100, 4)
    manifold = Lorentz()
    layer = HypLinearAttention(4, 2, manifold)
    pairs = torch.combinations(torch.arange(5), 2)
    performer = HigherOrderAttention(2, 2, 4, heads=1, kernel="performer")
    performer.together_from = 1
    edges = Hyperedges(pairs, torch.randn(len(pairs), 4), num_nodes=5)
    rows = torch.eye(5).to_sparse()
    for module, inputs in (
        (layer, (manifold.lift(x),)),
        (HypformerBlock(4, 2, manifold), (manifold.lift(x),)),
        (performer, (edges,)),
        (GCN(5, 3, 2), (rows, torch.tensor([[0, 1], [1, 0]]))),
    ):
        parts, by_hook, by_class = seen(module.eval(), inputs)
        assert by_hook == by_class == parts


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


def test_parametrized_weights_are_those_that_count():
    """And hooks that change a result change that of the model."""
    model = Hypformer(3, 4, 2, layers=1, graph_encoder=None).eval()
    x = torch.randn(6, 3)
    before = model(x)
    part = model.encoder.blocks[0].feedforward[2]
    twin = 2 * part.weight.detach()
    parametrize.register_parametrization(part, "weight", Doubled())
    parametrized = model(x)
    parametrize.remove_parametrizations(part, "weight")
    torch.testing.assert_close(part.weight, twin)
    torch.testing.assert_close(model(x), parametrized, rtol=1e-5, atol=1e-6)
    part.register_forward_hook(lambda module, inputs, points: module.manifold_out.lift(0.5 * points[..., 1:]))
    assert not torch.allclose(model(x), parametrized)
    assert not torch.allclose(before, parametrized)
