"""Every public class of layers, models and manifolds, at every value of every option: what the laws run over.

A :class:`Case` knows how to make a module and inputs for it in a :class:`Setting` (sizes, curvatures, dtype, device),
where the output lies, and the loop-written reference. ``test_registry`` fails when a public class is missing here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from holonomy import layers, manifolds, models
from holonomy.manifolds import Lorentz
from tests.reference import REFERENCES

# Not modules with a forward of their own: tests/manifolds is about them.
ELSEWHERE = {manifolds.Curvature, manifolds.Lorentz}


@dataclass
class Setting:
    """Sizes, curvatures and types of one example; manifolds are made once, so that layers can share them."""

    nodes: int = 5
    features: int = 6
    curvatures: tuple[float, ...] = (-1.0, -0.3, -2.5)
    radius: float = 1.0
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    manifolds: dict[int, Lorentz] = field(default_factory=dict)

    @property
    def factory(self) -> dict[str, Any]:
        """Device and dtype, for constructors."""
        return {"device": self.device, "dtype": self.dtype}

    def manifold(self, index: int) -> Lorentz:
        """Return the manifold of the given curvature, learnable."""
        if index not in self.manifolds:
            self.manifolds[index] = Lorentz(self.curvatures[index], learnable=True, **self.factory)
        return self.manifolds[index]

    def vectors(self, *shape: int) -> Tensor:
        """Return normal vectors times the radius, the first one zero where the radius is not one."""
        x = torch.randn(*shape, **self.factory) * self.radius
        if self.radius != 1.0:
            x[..., :1, :] = 0.0
        return x

    def points(self, *shape: int, index: int = 0) -> Tensor:
        """Return points of a manifold, detached from its curvature."""
        return self.manifold(index).lift(self.vectors(*shape)).detach()

    def edges(self) -> Tensor:
        """Return a ring with a chord, both directions."""
        i = torch.arange(self.nodes, device=self.device)
        pairs = torch.stack([i, (i + 1) % self.nodes])
        chord = torch.tensor([[0], [self.nodes // 2]], device=self.device)
        one_way = torch.cat([pairs, chord], dim=1)
        one_way = one_way[:, one_way[0] != one_way[1]]
        return torch.cat([one_way, one_way.flip(0)], dim=1).unique(dim=1)

    def padding(self) -> Tensor:
        """Return a key-padding mask of two graphs, the last node of the second being none."""
        mask = torch.zeros(2, self.nodes, dtype=torch.bool, device=self.device)
        mask[1, -1] = True
        return mask


Make = Callable[[Setting], nn.Module]
Inputs = Callable[[Setting], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One public class at one value of each option.

    Attributes:
        name: what the test report shows.
        kind: the class.
        make: the module, from a setting.
        inputs: its inputs.
        source: index of the manifold that the input lies on, None for raw features.
        target: index of the manifold that the output lies on, None where it is no point.
        random: whether training mode draws random numbers.
        nodewise: whether the rows of the input may be permuted, and the output's follow.
    """

    name: str
    kind: type[nn.Module]
    make: Make
    inputs: Inputs
    source: int | None = 0
    target: int | None = 0
    random: bool = False
    nodewise: bool = True

    def build(self, setting: Setting) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return module and inputs, drawn from the seed that is set."""
        return self.make(setting).to(setting.device), self.inputs(setting)

    @property
    def reference(self) -> Callable[..., Tensor] | None:
        """The loop-written formula, where there is one."""
        return REFERENCES.get(self.kind)


def _points(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.points(setting.nodes, setting.features),)


def _raw(setting: Setting) -> tuple[Tensor, ...]:
    return (setting.vectors(setting.nodes, setting.features),)


def _graph(setting: Setting) -> tuple[Tensor, ...]:
    return (*_raw(setting), setting.edges())


def _padded(setting: Setting) -> tuple[Tensor, ...]:
    return setting.points(2, setting.nodes, setting.features), setting.padding()


def _to(setting: Setting, target: int) -> Lorentz | None:
    return None if target == 0 else setting.manifold(target)


CASES: list[Case] = []


def _register(kind: type[nn.Module], options: str, make: Make, inputs: Inputs = _points, **flags: Any) -> None:
    CASES.append(Case(f"{kind.__name__}[{options}]", kind, make, inputs, **flags))


# Linear maps: with and without bias, with and without a change of curvature.
for kind, bias, target in itertools.product(
    (layers.HTC, layers.ExpMapHTC, layers.TangentLinear, layers.FullyLorentzLinear), (True, False), (0, 1)
):
    raw = kind is layers.ExpMapHTC
    _register(
        kind,
        f"bias={bias}, to={target}",
        lambda s, kind=kind, bias=bias, target=target: kind(
            s.features, 3, s.manifold(0), _to(s, target), bias=bias, **s.factory
        ),
        _raw if raw else _points,
        source=None if raw else 0,
        target=target,
    )
_register(
    layers.FullyLorentzLinear,
    "activation=tanh, scale=2",
    lambda s: layers.FullyLorentzLinear(s.features, 3, s.manifold(0), activation=torch.tanh, scale=2.0, **s.factory),
)

# Refinements.
for target in (0, 1):
    to = f"to={target}"
    _register(
        layers.HRC, to, lambda s, t=target: layers.HRC(nn.functional.silu, s.manifold(0), _to(s, t)), target=target
    )
    for function in (torch.relu, torch.tanh):
        _register(
            layers.HypActivation,
            f"{function.__name__}, {to}",
            lambda s, f=function, t=target: layers.HypActivation(f, s.manifold(0), _to(s, t)),
            target=target,
        )
    for affine in (True, False):
        _register(
            layers.HypLayerNorm,
            f"affine={affine}, {to}",
            lambda s, a=affine, t=target: layers.HypLayerNorm(
                s.features, s.manifold(0), _to(s, t), elementwise_affine=a, **s.factory
            ),
            target=target,
        )
        _register(
            layers.HypBatchNorm,
            f"affine={affine}, {to}",
            lambda s, a=affine, t=target: layers.HypBatchNorm(
                s.features, s.manifold(0), _to(s, t), affine=a, **s.factory
            ),
            target=target,
        )
    _register(
        layers.HypDropout,
        to,
        lambda s, t=target: layers.HypDropout(0.5, s.manifold(0), _to(s, t)),
        target=target,
        random=True,
    )
    _register(
        layers.HypConcat,
        to,
        lambda s, t=target: layers.HypConcat(s.manifold(0), _to(s, t)),
        lambda s: (s.points(s.nodes, s.features), s.points(s.nodes, 2)),
        target=target,
    )
_register(
    layers.HypBatchNorm,
    "track_running_stats=False, momentum=0.5",
    lambda s: layers.HypBatchNorm(s.features, s.manifold(0), momentum=0.5, track_running_stats=False, **s.factory),
)

# Midpoints.
for epsilon, target in itertools.product((1.0, 0.25), (0, 1)):
    _register(
        layers.HypResidual,
        f"epsilon={epsilon}, to={target}",
        lambda s, e=epsilon, t=target: layers.HypResidual(
            s.manifold(0), _to(s, t), manifold_branch=s.manifold(2), epsilon=e
        ),
        lambda s: (s.points(s.nodes, s.features), s.points(s.nodes, s.features, index=2)),
        target=target,
    )
for epsilon in (1.0, 0.25):
    _register(
        layers.HypPositionalEncoding,
        f"epsilon={epsilon}",
        lambda s, e=epsilon: layers.HypPositionalEncoding(s.features, s.manifold(0), epsilon=e, **s.factory),
    )

# Attention: three curvatures, one graph and padded graphs.
for heads, power, target, inputs in (
    (1, 2.0, 0, _points),
    (2, 2.0, 1, _points),
    (3, 1.0, 1, _padded),
    (2, 3.0, 0, _padded),
):
    _register(
        layers.HypLinearAttention,
        f"heads={heads}, power={power}, to={target}, padded={inputs is _padded}",
        lambda s, h=heads, p=power, t=target: layers.HypLinearAttention(
            s.features, h, s.manifold(0), _to(s, t), manifold_hidden=s.manifold(2), power=p, **s.factory
        ),
        inputs,
        target=target,
        nodewise=inputs is _points,
    )
for similarity, (heads, target, inputs) in itertools.product(
    ("geodesic_squared", "lorentz_squared", "geodesic"), ((1, 0, _points), (2, 1, _padded))
):
    _register(
        layers.HypSoftmaxAttention,
        f"{similarity}, heads={heads}, to={target}, padded={inputs is _padded}",
        lambda s, sim=similarity, h=heads, t=target: layers.HypSoftmaxAttention(
            s.features, h, s.manifold(0), _to(s, t), manifold_hidden=s.manifold(2), similarity=sim, **s.factory
        ),
        inputs,
        target=target,
        nodewise=inputs is _points,
    )
_register(
    layers.HypSoftmaxAttention,
    "dropout=0.5",
    lambda s: layers.HypSoftmaxAttention(s.features, 2, s.manifold(0), dropout=0.5, **s.factory),
    random=True,
)

# Classifiers.
for kind in (layers.HypMLR, layers.HypPrototypes):
    _register(kind, "", lambda s, kind=kind: kind(s.features, 3, s.manifold(0), **s.factory), target=None)

# Euclidean graph encoders.
for depth, residual in ((1, False), (2, False), (3, True)):
    _register(
        layers.GCN,
        f"layers={depth}, residual={residual}",
        lambda s, n=depth, r=residual: layers.GCN(s.features, 4, 3, layers=n, residual=r, **s.factory),
        _graph,
        source=None,
        target=None,
        nodewise=False,
    )
for steps, teleport in ((1, 0.1), (4, 0.5)):
    _register(
        layers.Propagation,
        f"steps={steps}, teleport={teleport}",
        lambda s, n=steps, t=teleport: layers.Propagation(s.features, 4, 3, steps=n, teleport=t, **s.factory),
        _graph,
        source=None,
        target=None,
        nodewise=False,
    )

# Learned points.
_register(
    manifolds.LorentzPoints,
    "",
    lambda s: manifolds.LorentzPoints(s.nodes, s.features, s.manifold(1), std=s.radius, **s.factory),
    lambda _: (),
    source=None,
    target=1,
    nodewise=False,
)
_register(
    manifolds.LorentzEmbedding,
    "",
    lambda s: manifolds.LorentzEmbedding(s.nodes, s.features, s.manifold(1), **s.factory),
    lambda s: (torch.arange(s.nodes, device=s.device).flip(0)[:, None],),
    source=None,
    target=1,
    nodewise=False,
)

# Models.
for attention, target in (("linear", 0), ("softmax", 1)):
    _register(
        models.HypformerBlock,
        f"{attention}, to={target}",
        lambda s, a=attention, t=target: models.HypformerBlock(
            s.features,
            2,
            s.manifold(0),
            _to(s, t),
            manifold_attention=s.manifold(2),
            manifold_feedforward=s.manifold(1),
            feedforward=5,
            attention=a,
            **s.factory,
        ),
        target=target,
    )
_register(
    models.HypformerBlock,
    "similarity=geodesic, dropout=0.5, padded",
    lambda s: models.HypformerBlock(
        s.features, 1, s.manifold(0), attention="softmax", similarity="geodesic", dropout=0.5, norm_eps=0.1, **s.factory
    ),
    _padded,
    random=True,
    nodewise=False,
)
for name, options, graph in (
    ("default", {}, True),
    ("softmax, mlr", {"attention": "softmax", "decoder": "mlr", "layers": 1}, True),
    ("lorentz_squared, prototypes, heads=2", {
        "attention": "softmax", "similarity": "lorentz_squared", "decoder": "prototypes", "heads": 2, "layers": 1,
    }, True),
    ("no graph, power=3, gelu", {
        "graph_encoder": None, "power": 3.0, "layers": 1, "activation": nn.functional.gelu, "curvature": -0.2,
    }, False),
    ("no transformer, mlr", {"transformer": False, "decoder": "mlr"}, True),
    ("dropout", {"dropout": 0.3, "output_dropout": 0.5, "graph_weight": 0.9, "layers": 1}, True),
    ("fixed curvature", {"learnable_curvature": False, "feedforward": 3, "norm_eps": 0.1, "layers": 1}, True),
):  # fmt: skip
    _register(
        models.Hypformer,
        name,
        lambda s, options=options: models.Hypformer(s.features, 8, 3, **options, **s.factory),
        _graph if graph else _raw,
        source=None,
        target=None,
        random=name == "dropout",
        nodewise=not graph,
    )


def public_classes() -> Sequence[type[nn.Module]]:
    """Return every class that the packages publish."""
    published = [getattr(package, name) for package in (layers, models, manifolds) for name in package.__all__]
    return [item for item in published if isinstance(item, type)]
