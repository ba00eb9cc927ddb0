"""What each kind of argument may be, and what it must not be.

``valid`` values fit the others of a call, which the :class:`Scene` holds. ``wrong`` values must be refused by a
sentence that names the argument. ``doubtful`` ones (half precision, infinities, other devices) may be refused so, or
computed with.
"""

# Changes are short functions in tables, whose types the tables say.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import geoopt
import torch
from torch import Tensor, nn

from holonomy.layers import HTC, SimplicialAttention
from holonomy.manifolds import Lorentz, hyperboloid
from holonomy.models import Hypformer
from holonomy.theory import Trial
from tests.fuzz.source import Source

__all__ = ["KINDS", "Kind", "Scene", "hypformer", "laid_out", "learned", "lengthen", "scene"]

_GENERATOR = torch.Generator()
# Powers of ten that rows are multiplied with, to the ends of what the dtype holds.
_EXPONENTS = {
    torch.float64: (0, -1, 1, -3, 3, 2, -8, 8, 16, -16, 30, -40, 75, 150, -160, 300, 306, -310),
    torch.float32: (0, -1, 1, -3, 3, 2, -8, 8, 5, 12, 18, -20, -30, 30, 36, 37, -40, -44),
}
_CURVATURES = (-1.0, -0.3, -2.5, -0.01, -100.0, -1e-6, -1e6)


@dataclass
class Scene:
    """Sizes and types that the arguments of one call share, and the arguments that were drawn before."""

    source: Source
    dtype: torch.dtype = torch.float64
    dim: int = 2
    lead: tuple[int, ...] = ()
    nodes: int = 3
    curvature: float = -1.0
    seen: dict[str, Any] = field(default_factory=dict)

    @property
    def manifold(self) -> Lorentz:
        """The manifold of the points, learnable."""
        return manifold(self.curvature, self.dtype)


def scene(source: Source) -> Scene:
    """Draw sizes, curvature and dtype."""
    return Scene(
        source,
        source.pick((torch.float64, torch.float32)),
        source.pick((2, 1, 3, 5, 7)),
        source.pick(((), (1,), (3,), (2, 3), (0,), (5,), (2, 0), (2, 1, 3))),
        source.pick((3, 2, 5, 4, 1, 7)),
        source.pick(_CURVATURES),
    )


@cache
def manifold(curvature: float, dtype: torch.dtype) -> Lorentz:
    """Manifolds are made once."""
    return Lorentz(curvature, learnable=True, dtype=dtype)


Draw = Callable[[Scene], Any]
Change = Callable[[Scene, Any], Any]


class Kind(NamedTuple):
    """One kind of argument: right values, and changes of a right value to one that is wrong or doubtful."""

    valid: Draw
    wrong: Mapping[str, Change]
    doubtful: Mapping[str, Change] = {}


# Tensors.


def numbers(scene: Scene, *shape: int, moderate: bool = False) -> Tensor:
    """Normal numbers, each row times a power of ten."""
    content = scene.source.below(8)
    x = torch.ones(shape, dtype=torch.float64)
    if content == 1 and shape and shape[-1]:
        x[..., 1:] = 0.0
    elif content:
        x.normal_(generator=_GENERATOR.manual_seed(content))
    exponents = (0, -1, -3, -8, 1) if moderate else _EXPONENTS[scene.dtype]
    largest, rows = torch.finfo(scene.dtype).max, math.prod(shape[:-1])
    sizes = [10.0 ** scene.source.pick(exponents) for _ in range(min(rows, 3))]
    sizes = torch.tensor(sizes, dtype=torch.float64).repeat(rows)[:rows]
    x = x * sizes.reshape(*shape[:-1], 1)
    return laid_out(x.clamp(-largest, largest).to(scene.dtype), scene.source)


def laid_out(x: Tensor, source: Source) -> Tensor:
    """The same numbers elsewhere in memory, or its first row repeated."""
    layout = source.below(6)
    if layout == 3:
        return torch.stack([x, x], -1)[..., 0]
    if layout == 4 and x.ndim > 1:
        return x.mT.contiguous().mT
    if layout == 5 and x.ndim > 1 and len(x):
        return x[:1].expand_as(x)
    return x


def _clashing(scene: Scene, x: Tensor) -> Any:
    """Rows of a number that broadcasts to none of the others."""
    others = [y for y in scene.seen.values() if isinstance(y, Tensor) and y is not x and y.ndim > 1 and y.shape[-2] > 1]
    return x[..., :1, :].expand(*x.shape[:-2], 11, x.shape[-1]) if others and x.ndim > 1 else NotImplemented


def _lead(scene: Scene) -> tuple[int, ...]:
    """Leading axes, the same as of the arguments before or some that broadcast to them."""
    return scene.source.pick((scene.lead, scene.lead, tuple(1 for _ in scene.lead), ()))


def _point(scene: Scene) -> Tensor:
    return laid_out(_lifted(scene, numbers(scene, *scene.lead, scene.dim)), scene.source)


def _lifted(scene: Scene, space: Tensor) -> Tensor:
    return hyperboloid.lift(space, scene.manifold.curvature.detach())


def _other_point(scene: Scene) -> Tensor:
    """A point anywhere, or beside, on, behind or opposite the one before."""
    relation = scene.source.below(8)
    before = next((x for x in scene.seen.values() if isinstance(x, Tensor)), None)
    if before is None or relation < 3:
        return laid_out(_lifted(scene, numbers(scene, *_lead(scene), scene.dim)), scene.source)
    factor = (1.0, 1.0 + 1e-6, -1.0, 2.0, 0.0)[relation - 3]
    largest = torch.finfo(scene.dtype).max
    return _lifted(scene, (before[..., 1:] * factor).clamp(-largest, largest))


def _tangent(scene: Scene) -> Tensor:
    """A vector at the point before, or any, of which only the space part is read."""
    vector = numbers(scene, *_lead(scene), scene.dim)
    return laid_out(nn.functional.pad(vector, (1, 0)), scene.source)


def _unit(scene: Scene) -> Tensor:
    """A unit tangent vector at the point before."""
    x, kappa = scene.seen["x"].double(), scene.manifold.curvature.detach().double()
    direction = torch.arange(1.0, scene.dim + 1.0, dtype=torch.float64)
    u = nn.functional.pad(direction / direction.norm(), (1, 0)).expand_as(x)
    return hyperboloid.transp0(x, u, kappa).to(scene.dtype)


def _ball(scene: Scene) -> Tensor:
    """Points of a ball of radius 1/sqrt(-curvature)."""
    direction = numbers(scene, *scene.lead, scene.dim, moderate=True)
    share = scene.source.pick((0.5, 0.0, 0.1, 0.9, 0.999, 1e-6))
    length = direction.norm(dim=-1, keepdim=True).clamp_min(1e-300 if scene.dtype == torch.float64 else 1e-30)
    return direction / length * share / math.sqrt(-scene.curvature)


def _spread(scene: Scene) -> Tensor:
    """Positive numbers for each axis of space, rows of them of any size."""
    x = numbers(scene, *_lead(scene), scene.dim)
    return x.abs().clamp(min=torch.finfo(x.dtype).tiny)


def _weights(scene: Scene) -> Tensor:
    n, rows = scene.seen["x"].shape[-2], scene.source.pick((None, 1, 2))
    shape = (*scene.lead, n) if rows is None else (*scene.lead, rows, n)
    return numbers(scene, *shape).abs() * scene.source.pick((1.0, 1.0, 0.0))


OBJECTS: dict[str, Change] = {
    "text": lambda s, x: "text",
    "number": lambda s, x: 1.5,
    "object": lambda s, x: object(),
    "dict": lambda s, x: {"x": x},
}
AS_LIST: dict[str, Change] = {
    "list": lambda s, x: x.tolist(),
    "array": lambda s, x: x.detach().numpy(),
}
NONE: dict[str, Change] = {"none": lambda s, x: None}
NO_FLOAT: dict[str, Change] = {
    "integers": lambda s, x: torch.ones(x.shape, dtype=torch.int64),
    "booleans": lambda s, x: torch.ones(x.shape, dtype=torch.bool),
    "complex": lambda s, x: x.to(torch.complex64),
}
LAST_AXIS: dict[str, Change] = {
    "longer": lambda s, x: torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1),
    "shorter": lambda s, x: x[..., :-1],
    "no axis": lambda s, x: x.new_ones(()),
}
NO_AXIS: dict[str, Change] = {"no axis": lambda s, x: x.new_ones(())}
LEADING: dict[str, Change] = {"other batch": _clashing}
ODD: dict[str, Change] = {
    "nan": lambda s, x: torch.full_like(x, math.nan),
    "infinite": lambda s, x: torch.full_like(x, math.inf),
    "float16": lambda s, x: x.half(),
    "bfloat16": lambda s, x: x.bfloat16(),
    "other dtype": lambda s, x: x.float() if x.dtype == torch.float64 else x.double(),
    "meta": lambda s, x: x.to("meta"),
    "sparse": lambda s, x: x.detach().to_sparse(),
    "empty": lambda s, x: x[..., :0],
    "more axes": lambda s, x: x[None, None],
}

ANY_TENSOR = OBJECTS | AS_LIST | NONE
FLOATS = ANY_TENSOR | NO_FLOAT
# Tensors whose last axis another one fixes, and those of any length.
TIED, UNTIED = FLOATS | LAST_AXIS, FLOATS | NO_AXIS
# One number stands for all of the last axis.
SPREAD = {how: TIED[how] for how in TIED if how != "shorter"}

# Integers and masks.

INTEGERS: dict[str, Change] = {
    "floats": lambda s, x: x.double(),
    "booleans": lambda s, x: x.bool(),
} | ANY_TENSOR
CODES = INTEGERS | {
    "negative": lambda s, x: x - 1000 if x.numel() else NotImplemented,
    "too large": lambda s, x: x + 1000 if x.numel() else NotImplemented,
}
ODD_INTEGERS: dict[str, Change] = {"int32": lambda s, x: x.int(), "meta": lambda s, x: x.to("meta")}
EDGES = CODES | {
    "three rows": lambda s, x: torch.cat([x, x[:1]]),
    "one axis": lambda s, x: x[0],
    "turned": lambda s, x: torch.ones(5, 2, dtype=torch.int64),
}
BATCH = INTEGERS | {
    "longer": lambda s, x: torch.cat([x, x.new_zeros(1)]),
    "negative": lambda s, x: x - 1000 if x.numel() else NotImplemented,
    "two axes": lambda s, x: x[None],
}
MASK = ANY_TENSOR | {
    "floats": lambda s, x: x.double(),
    "integers": lambda s, x: x.long(),
    "longer": lambda s, x: torch.cat([x, x[..., :1]], -1) if x.shape[-1:] != (0,) else x.new_ones(*x.shape[:-1], 1),
}
ODD_MASK: dict[str, Change] = {
    "all": lambda s, x: torch.ones_like(x),
    "none of them": lambda s, x: torch.zeros_like(x),
    "meta": lambda s, x: x.to("meta"),
}


def _each(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """A state whose tensors are changed alike; there is none at the first step."""
    if state is None:
        return NotImplemented
    if isinstance(state, Tensor):
        return change(state)
    parts = [_each(change, part) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def _other_dtype(x: Tensor) -> Tensor:
    other = {torch.float64: torch.float32, torch.float32: torch.float64}
    return x.to(other.get(x.dtype, x.dtype))


STATE: dict[str, Change] = OBJECTS | {
    "tensor": lambda s, x: torch.zeros(3),
    "empty": lambda s, x: (),
    "of more sequences": lambda s, x: _each(lambda part: torch.stack([part] * 3), x),
}
ODD_STATE: dict[str, Change] = {
    "other dtype": lambda s, x: _each(_other_dtype, x),
    "nan": lambda s, x: _each(lambda part: part * math.nan if part.is_floating_point() else part, x),
}


def _edges(scene: Scene) -> Tensor:
    """Edges within graphs, loops and an isolated node among them, none twice."""
    batch = scene.seen.setdefault("a batch", _batch(scene))
    content = scene.source.below(6)
    pairs = [(i, j) for i in range(scene.nodes) for j in range(scene.nodes) if batch[i] == batch[j]]
    share = (0.0, 0.3, 0.5, 0.8, 1.0, 0.1)[content]
    kept = torch.rand(len(pairs), generator=_GENERATOR.manual_seed(content)) < share
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)[kept].T.contiguous()


def _symmetric(scene: Scene) -> Tensor:
    edges = _edges(scene)
    return torch.cat([edges, edges.flip(0)], 1).unique(dim=1)


def _batch(scene: Scene) -> Tensor:
    if "a batch" in scene.seen:
        return scene.seen["a batch"]
    content = scene.source.below(4)
    if content < 2:
        return torch.full((scene.nodes,), content // 2, dtype=torch.int64)
    return torch.randint(0, 3, (scene.nodes,), generator=_GENERATOR.manual_seed(content))


# Numbers, choices, functions.

NO_NUMBER: dict[str, Change] = {
    "text": lambda s, x: "1",
    "none": lambda s, x: None,
    "boolean": lambda s, x: True,
    "list": lambda s, x: [1],
    "complex": lambda s, x: 1j,
    "nan": lambda s, x: math.nan,
    "object": lambda s, x: object(),
    "tensor of two": lambda s, x: torch.ones(2),
}
NO_INTEGER = NO_NUMBER | {"fraction": lambda s, x: 2.5, "float": lambda s, x: 2.0, "negative": lambda s, x: -1}
SIZE = NO_INTEGER | {"zero": lambda s, x: 0}
COUNT = NO_INTEGER
PROBABILITY = NO_NUMBER | {
    "negative": lambda s, x: -0.1,
    "over one": lambda s, x: 1.1,
    "infinite": lambda s, x: math.inf,
}
POSITIVE = NO_NUMBER | {"negative": lambda s, x: -1.0, "infinite": lambda s, x: -math.inf}
CURVATURE = NO_NUMBER | {
    "zero": lambda s, x: 0.0,
    "positive": lambda s, x: 1.0,
    "infinite": lambda s, x: -math.inf,
    "learning": lambda s, x: nn.Parameter(torch.tensor(-1.0)),
    "too small": lambda s, x: -1e-320,
    "too large": lambda s, x: -1e305,
}
CHOICE: dict[str, Change] = {
    "unknown": lambda s, x: "unknown",
    "number": lambda s, x: 3,
    "list": lambda s, x: ["a"],
    "object": lambda s, x: object(),
}
FUNCTION: dict[str, Change] = {
    "text": lambda s, x: "relu",
    "class": lambda s, x: nn.ReLU,
    "number": lambda s, x: 3,
    "none": lambda s, x: None,
}
MANIFOLD: dict[str, Change] = {
    "number": lambda s, x: -1.0,
    "text": lambda s, x: "lorentz",
    "Geoopt's": lambda s, x: geoopt.Lorentz(),
    "class": lambda s, x: Lorentz,
    "none": lambda s, x: None,
}
MODULE: dict[str, Change] = {"text": lambda s, x: "text", "number": lambda s, x: 3, "class": lambda s, x: nn.Linear}
SEQUENCE: dict[str, Change] = {
    "number": lambda s, x: 2,
    "text": lambda s, x: "22",
    "none": lambda s, x: None,
    "negative": lambda s, x: (-1, 2),
    "fractions": lambda s, x: (1.5, 2),
    "empty": lambda s, x: (),
}
WINDOW: dict[str, Change] = {
    "text": lambda s, x: "2",
    "negative": lambda s, x: -1,
    "fraction": lambda s, x: 1.5,
}
DTYPE: dict[str, Change] = {
    "integer": lambda s, x: torch.int64,
    "text": lambda s, x: "float32",
    "number": lambda s, x: 3,
    "none": lambda s, x: None,
}
# What torch has no device for it says itself, in a RuntimeError.
DEVICE: dict[str, Change] = {"number": lambda s, x: 1.5}
GENERATOR: dict[str, Change] = {"number": lambda s, x: 3, "text": lambda s, x: "seed"}
FLAG: dict[str, Change] = {"text": lambda s, x: "no", "number": lambda s, x: 2, "none": lambda s, x: None}


def _generator(scene: Scene) -> torch.Generator:
    return torch.Generator().manual_seed(scene.source.below(1000))


def _sized(scene: Scene) -> tuple[int, ...]:
    return (*scene.lead, scene.dim + 1)


def _types(scene: Scene) -> Tensor:
    """A type of each edge."""
    return torch.arange(scene.seen["edge_index"].shape[1]) % 3


def _rows(scene: Scene) -> Tensor:
    """Features of the nodes."""
    return numbers(scene, scene.nodes, scene.dim)


def _attributes(scene: Scene) -> Tensor:
    return numbers(scene, scene.seen["edge_index"].shape[1], 2)


def _tuples(scene: Scene) -> Tensor:
    """Hyperedges of order two within graphs, none twice."""
    return _edges(scene).T.contiguous()


def _pairs(scene: Scene) -> Tensor:
    content = scene.source.below(4)
    return torch.rand(scene.nodes, scene.nodes, generator=_GENERATOR.manual_seed(content)) < content / 3


def _mask(scene: Scene) -> Tensor:
    content = scene.source.below(4)
    return torch.rand(2, scene.nodes, generator=_GENERATOR.manual_seed(content)) < content / 3


def _slots(scene: Scene, count: int) -> list[Tensor]:
    """Keys or values of simplicial attention of two heads, of order two, with logits of order one."""
    return [numbers(scene, 2, scene.nodes, 3, moderate=True) for _ in range(count)]


def _graphs(scene: Scene) -> list[dict[str, Tensor]]:
    return [{"x": _rows(scene), "edge_index": _edges(scene)} for _ in range(scene.source.pick((1, 2)))]


@cache
def _attention(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return SimplicialAttention(4, 2, order=1, dtype=dtype).eval()


@cache
def _transformation(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return HTC(4, 3, manifold(-1.0, dtype), dtype=dtype).eval()


@cache
def hypformer(which: int, length: float, dtype: torch.dtype) -> nn.Module:
    """A model in evaluation whose certificates are asked for, its weights as long as told."""
    options: dict[str, Any] = ({}, {"attention": "softmax"}, {"decoder": "mlr"}, {"layers": 2, "average": "midpoint"})[
        which
    ]
    torch.manual_seed(0)
    model = Hypformer(4, 4, 3, **{"layers": 1, "feedforward": 4} | options, dtype=dtype).eval()
    lengthen(model, length)
    model.made_by = f"domains.hypformer({which}, {length!r}, {dtype})"
    return model


def lengthen(module: nn.Module, length: float) -> int:
    """Multiply the weights of linear maps; return how many there are."""
    weights = [
        weight
        for name, weight in module.named_parameters()
        if name.endswith("weight") and weight.ndim > 1 and not isinstance(weight, geoopt.ManifoldParameter)
    ]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(length)
    return len(weights)


def _some_nodes(scene: Scene) -> Any:
    nodes = [scene.nodes - 1, 0][: scene.source.pick((1, 2))]
    return scene.source.pick((nodes, torch.tensor(nodes)))


def _classes(scene: Scene) -> Tensor:
    return torch.arange(len(scene.seen["nodes"])) + scene.source.pick((0, 1))


def _threat(scene: Scene) -> str:
    """What moves; a victim is somebody else where one node does."""
    return "node" if "victim" in scene.seen else scene.source.pick(("node", "frobenius", "each"))


def _unit_curvature(scene: Scene) -> Scene:
    scene.curvature = -1.0
    return scene


def learned(points: Tensor, manifold: Lorentz) -> geoopt.ManifoldParameter:
    """Points as a parameter."""
    # Geoopt types neither this constructor nor its keyword.
    return geoopt.ManifoldParameter(points, manifold=manifold)


def _held(fixed: Lorentz, width: int) -> geoopt.ManifoldParameter:
    # On a learning manifold the optimizer warns of it.
    return learned(fixed.origin(2, width), fixed)


def choice(*values: Any) -> Kind:
    """One of several, and what is none of them."""
    return Kind(lambda s: s.source.pick(values), CHOICE)


def count(*values: int, zero: bool = False) -> Kind:
    """A size or a number from zero on."""
    return Kind(lambda s: s.source.pick(values), COUNT if zero else SIZE)


LAYER: dict[str, Change] = {
    "text": lambda s, x: "layer",
    "number": lambda s, x: 3,
    "none": lambda s, x: None,
    "class": lambda s, x: nn.Linear,
    "object": lambda s, x: object(),
}
LIST: dict[str, Change] = {
    "number": lambda s, x: 3,
    "text": lambda s, x: "text",
    "none": lambda s, x: None,
    "object": lambda s, x: object(),
    "of text": lambda s, x: ["text"],
    "of none": lambda s, x: [None],
}

KINDS: dict[str, Kind] = {
    "vector": Kind(lambda s: numbers(s, *s.lead, s.dim), UNTIED, ODD),
    "point": Kind(_point, UNTIED, ODD),
    "first": Kind(_point, TIED | LEADING, ODD),
    "other": Kind(_other_point, TIED | LEADING, ODD),
    "tangent": Kind(_tangent, TIED | LEADING, ODD),
    "tangent0": Kind(_tangent, UNTIED, ODD),
    "ambient": Kind(lambda s: numbers(s, *_lead(s), s.dim + 1), TIED | LEADING, ODD),
    "loose_ambient": Kind(lambda s: numbers(s, *s.lead, s.dim + 1), UNTIED, ODD),
    "unit": Kind(_unit, TIED | LEADING, ODD),
    "ball": Kind(_ball, UNTIED, ODD),
    # A number is an arc too.
    "arc": Kind(
        lambda s: numbers(s, *s.lead, 1, moderate=True), {n: FLOATS[n] for n in FLOATS if n != "number"} | LEADING, ODD
    ),
    "points": Kind(lambda s: _lifted(s, numbers(s, *s.lead, s.source.pick((2, 1, 3, 0, 5)), s.dim)), TIED, ODD),
    "some_points": Kind(lambda s: _lifted(s, numbers(s, *s.lead, s.source.pick((2, 1, 3, 5)), s.dim)), UNTIED, ODD),
    "weights": Kind(
        _weights,
        FLOATS
        | LAST_AXIS
        | {
            "negative": lambda s, x: -1.0 - x if x.numel() else NotImplemented,
            "infinite": lambda s, x: torch.full_like(x, math.inf) if x.numel() else NotImplemented,
        },
        ODD | {"infinite": lambda s, x: x},
    ),
    "its_manifold": Kind(lambda s: s.manifold, MANIFOLD),
    "spread": Kind(_spread, SPREAD | LEADING | {"negative": lambda s, x: -x if x.numel() else NotImplemented}, ODD),
    "direction": Kind(
        lambda s: _spread(s) * s.source.pick((1.0, -1.0)),
        TIED | LEADING | {"zero": lambda s, x: torch.zeros_like(x) if x.numel() else NotImplemented},
        ODD,
    ),
    "share": Kind(
        lambda s: numbers(s, *s.seen["x"].shape[:-1], moderate=True).abs() * s.source.pick((1.0, 1.0, 0.0)),
        FLOATS | {"negative": lambda s, x: -1.0 - x if x.numel() else NotImplemented},
        ODD | NO_AXIS,
    ),
    "last_but_one": Kind(lambda s: -2, {**NO_INTEGER, "negative": lambda s, x: -9, "last": lambda s, x: -1}),
    "manifold": Kind(lambda s: manifold(s.source.pick(_CURVATURES), s.dtype), MANIFOLD),
    "flag": Kind(lambda s: s.source.pick((False, True)), {}, FLAG),
    "size": Kind(
        _sized,
        {
            "text": lambda s, x: ("a",),
            "negative": lambda s, x: (-1, 2),
            "fraction": lambda s, x: (2.5,),
            "none": lambda s, x: (),
        },
    ),
    "mean": Kind(lambda s: s.source.pick((0.0, 1.0, -3.0, 50.0)), NO_NUMBER, {"infinite": lambda s, x: math.inf}),
    "std": Kind(lambda s: s.source.pick((1.0, 0.0, 0.1, 30.0)), POSITIVE),
    "generator": Kind(_generator, GENERATOR),
    "dtype": Kind(lambda s: s.dtype, DTYPE, {"half": lambda s, x: torch.float16}),
    "device": Kind(lambda s: "cpu", {}, DEVICE | {"meta": lambda s, x: "meta"}),
    "edges": Kind(_edges, EDGES, ODD_INTEGERS),
    "symmetric": Kind(_symmetric, EDGES, ODD_INTEGERS),
    "nodes": Kind(lambda s: s.nodes, NO_INTEGER, {"zero": lambda s, x: 0}),
    "batch": Kind(_batch, BATCH, ODD_INTEGERS),
    "types": Kind(_types, BATCH, ODD_INTEGERS),
    "rows": Kind(_rows, FLOATS | NO_AXIS, ODD),
    "attributes": Kind(_attributes, FLOATS | NO_AXIS, ODD),
    "tuples": Kind(_tuples, INTEGERS | NO_AXIS, ODD_INTEGERS),
    "hyperedge_values": Kind(lambda s: numbers(s, len(s.seen["indices"]), s.dim), FLOATS | NO_AXIS, ODD),
    "pairs": Kind(_pairs, MASK, ODD_MASK),
    "categories": Kind(lambda s: _pairs(s).long(), INTEGERS, ODD_INTEGERS),
    "mask": Kind(_mask, {how: MASK[how] for how in MASK if how != "longer"}, ODD_MASK),
    "dense": Kind(lambda s: numbers(s, 2, s.nodes, s.nodes, s.dim), FLOATS | NO_AXIS, ODD),
    "node_mask": Kind(_mask, MASK, {}),
    "lattice": count(3, 0, 1, 2, 4, zero=True),
    "order": count(2, 0, 1, 3, zero=True),
    "count": count(2, 1, 3, 4),
    "limit": Kind(lambda s: s.source.pick((2, 1, 3, 4)), NO_INTEGER, {"zero": lambda s, x: 0}),
    "probability": Kind(lambda s: s.source.pick((0.5, 0.0, 0.1, 1.0)), PROBABILITY),
    "which": choice("lowest", "both"),
    "form": choice("product", "determinant"),
    "keys": Kind(lambda s: _slots(s, 3), LIST),
    "values": Kind(lambda s: _slots(s, 2), LIST),
    "neighbours": Kind(
        lambda s: torch.randint(0, s.nodes, (s.nodes, 2), generator=_GENERATOR.manual_seed(s.source.below(9))),
        CODES,
        ODD_INTEGERS,
    ),
    "patterns": Kind(
        lambda s: [torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 0, 2]])], LIST, {"empty": lambda s, x: []}
    ),
    "groups": Kind(
        lambda s: [[0], list(range(s.nodes))],
        LIST | {"too large": lambda s, x: [[1000]], "negative": lambda s, x: [[-1000]]},
        {"empty": lambda s, x: []},
    ),
    "graphs": Kind(_graphs, LIST | {"empty": lambda s, x: []}),
    "sizes": Kind(
        lambda s: s.source.pick(([3, 5, 2], [1], [], [7, 7, 7, 1, 2])), {n: LIST[n] for n in ("number", "text", "none")}
    ),
    "padding": Kind(lambda s: s.source.pick((1.05, 1.0, 2.0, math.inf)), NO_NUMBER | {"small": lambda s, x: 0.9}),
    "function": Kind(lambda s: torch.relu, {how: FUNCTION[how] for how in FUNCTION if how != "class"}),
    "anything": Kind(lambda s: numbers(s, *s.lead, s.dim), OBJECTS | AS_LIST | NONE, {"nan": ODD["nan"]}),
    "radius": Kind(lambda s: s.source.pick((1.0, 0.0, 0.1, 5.0)), POSITIVE),
    "positive": Kind(lambda s: s.source.pick((1.0, 0.1, 3.0)), POSITIVE),
    "one": count(1),
    "few": count(1, 0, 2, zero=True),
    "four": count(4),
    "told": Kind(lambda s: 4, SIZE | {"another": lambda s, x: 5}),
    "theorem": choice("L+"),
    "collapse_form": choice("weights", "chain"),
    "local_form": choice("sums", "blocks"),
    "metric": choice("l2", "sup"),
    "attention": Kind(lambda s: _attention(s.dtype), LAYER),
    "attentions": Kind(lambda s: [_attention(s.dtype)] * s.source.pick((1, 2)), LIST),
    "transformation": Kind(lambda s: _transformation(s.dtype), LAYER),
    "tokens": Kind(lambda s: numbers(s, max(s.nodes, 2), 4, moderate=True), TIED, ODD),
    "hypformer": Kind(
        lambda s: hypformer(s.source.below(4), s.source.pick((1.0, 30.0, 1e-3)), s.dtype),
        LAYER
        | {
            "in training": lambda s, x: Hypformer(4, 4, 3, dropout=0.5),
            "of graphs": lambda s, x: Hypformer(4, 4, 3, level="graph").eval(),
        },
    ),
    "features": Kind(lambda s: numbers(s, s.nodes, 4, moderate=True), TIED, ODD),
    "node": Kind(lambda s: s.source.below(s.nodes), NO_INTEGER | {"too large": lambda s, x: 1000}),
    "class": Kind(lambda s: s.source.below(3), NO_INTEGER | {"too large": lambda s, x: 3}),
    "reach": Kind(lambda s: s.source.pick((0.1, 0.0, 1e-3, 10.0, 1e6)), POSITIVE),
    "threat": Kind(_threat, CHOICE | {"edges": lambda s, x: "edges"}),
    "some_nodes": Kind(
        _some_nodes,
        {how: LIST[how] for how in LIST if how != "number"}
        | {
            "too large": lambda s, x: [1000],
            "negative": lambda s, x: [-1],
            "fractions": lambda s, x: torch.tensor([0.5]),
            "one number": lambda s, x: torch.tensor(0),
        },
    ),
    "labels": Kind(
        _classes,
        CODES | {"longer": lambda s, x: torch.cat([x, x[:1]])},
        {"int32": ODD_INTEGERS["int32"]},
    ),
    "radii": Kind(
        lambda s: torch.tensor([0.1, 0.0, 1e6][: s.source.pick((3, 1))], dtype=s.dtype),
        ANY_TENSOR
        | {"negative": lambda s, x: -1.0 - x, "nan": lambda s, x: x * math.nan, "two axes": lambda s, x: x[None]},
        {"integers": NO_FLOAT["integers"]},
    ),
    "few_points": Kind(lambda s: _lifted(_unit_curvature(s), numbers(s, 3, 4, moderate=True)), TIED, ODD),
    "points_apart": Kind(
        lambda s: _lifted(_unit_curvature(s), numbers(s, 3, 4, moderate=True) + torch.arange(3)[:, None]), TIED, ODD
    ),
    "claims": Kind(lambda s: ["hot"], LIST | {"unknown": lambda s, x: ["unknown"]}),
    "name": Kind(lambda s: "name", {}),
    "trials": Kind(lambda s: [Trial(0.5, 1.0)], LIST | {"empty": lambda s, x: []}),
    "seed": Kind(lambda s: s.source.below(9), NO_INTEGER),
    "parameters": Kind(
        lambda s: [_held(Lorentz(s.curvature, dtype=s.dtype), s.dim + 1)],
        LIST | {"module": lambda s, x: nn.Linear(2, 2), "empty": lambda s, x: []},
    ),
    "lr": Kind(lambda s: s.source.pick((0.1, 1e-3, 0.0, 1.0, 30.0, 1e3)), POSITIVE),
    "eps": Kind(lambda s: s.source.pick((1e-8, 0.0, 1e-3)), POSITIVE),
    "betas": Kind(
        lambda s: s.source.pick(((0.9, 0.999), (0.0, 0.0), (0.5, 0.1))),
        {
            "number": lambda s, x: 0.9,
            "one": lambda s, x: (1.0, 0.9),
            "negative": lambda s, x: (0.9, -0.1),
            "none": lambda s, x: None,
            "text": lambda s, x: ("a", "b"),
        },
    ),
    "stabilize": Kind(lambda s: s.source.pick((None, 1, 2)), {k: SIZE[k] for k in SIZE if k != "none"}),
    "table": Kind(lambda s: _lifted(s, numbers(s, s.source.pick((1, 3)), s.dim)), {}),
    "gradient": Kind(lambda s: numbers(s, *s.seen["points"].shape), {}),
}
