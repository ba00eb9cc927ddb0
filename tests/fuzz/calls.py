"""The manifold's methods and the public functions, each with the kinds of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

import holonomy
from holonomy.manifolds import Lorentz, WrappedNormal
from holonomy.optim import RiemannianAdam
from holonomy.theory import certify_node, lipschitz_bound, margin_bounds
from tests.fuzz.domains import KINDS, Kind, Scene, learned, scene
from tests.fuzz.judge import Call
from tests.fuzz.script import literal
from tests.fuzz.source import Source

__all__ = ["FUNCTIONS", "METHODS", "Target", "function", "method", "settle"]

# Of each method of the manifold: the arguments with their kinds, the optional ones with a question mark, and whether
# the result is points.
METHODS = {
    "lift": "space:vector -> points",
    "space": "x:point",
    "time": "x:point",
    "ratio": "to:manifold",
    "dist": "x:first y:other keepdim:flag?",
    "dist2": "x:first y:other keepdim:flag?",
    "dist0": "x:point keepdim:flag?",
    "cdist": "x:points y:points",
    "expmap": "x:first u:tangent -> points",
    "retr": "x:first u:tangent -> points",
    "geodesic_unit": "x:first u:unit t:arc -> points",
    "logmap": "x:first y:other",
    "expmap0": "u:tangent0 -> points",
    "logmap0": "y:point",
    "logmap0back": "x:point",
    "transp": "x:first y:other v:tangent",
    "transp0": "y:first u:tangent",
    "transp0back": "x:first u:tangent",
    "transp_follow_expmap": "x:first u:tangent v:tangent",
    "projx": "x:loose_ambient -> points",
    "proju": "x:first v:ambient",
    "egrad2rgrad": "x:first u:ambient",
    "inner": "x:first u:tangent v:tangent? keepdim:flag?",
    "norm": "u:tangent0 keepdim:flag?",
    "centroid": "x:some_points weights:weights? -> points",
    "rescale": "x:point to:manifold",
    "to_poincare": "x:point",
    "from_poincare": "p:ball -> points",
    "to_klein": "x:point",
    "from_klein": "p:ball -> points",
    "random": "size:size mean:mean? std:std? generator:generator? dtype:dtype? device:device? -> points",
    "random_normal": "size:size mean:mean? std:std? generator:generator? dtype:dtype? device:device? -> points",
    "origin": "size:size dtype:dtype? device:device? -> points",
}

# Of each public function, the same, after the package that it is imported from.
FUNCTIONS = {
    "manifolds.WrappedNormal": "loc:point scale:spread manifold:its_manifold",
    "manifolds.WrappedNormal.log_prob": "loc:point scale:spread manifold:its_manifold value:other",
    "manifolds.busemann": "x:first direction:direction manifold:its_manifold",
    "manifolds.frechet_mean": "x:some_points manifold:its_manifold weights:share? dim:last_but_one?",
    "manifolds.tangent_pca": "x:some_points manifold:its_manifold dim:count? -> points",
    "layers.bell": "m:lattice",
    "layers.set_partitions": "m:lattice",
    "layers.zeta_matrix": "m:lattice",
    "layers.moebius_matrix": "m:lattice",
    "layers.random_walk_encoding": "edge_index:symmetric n:nodes steps:count dtype:dtype?",
    "layers.random_walk_node_encoding": "edge_index:symmetric n:nodes steps:count dtype:dtype?",
    "layers.shortest_path_encoding": "edge_index:edges n:nodes limit:limit",
    "layers.edge_categories": "edge_index:edges n:nodes edge_type:types?",
    "layers.category_product": "categories:categories related:pairs",
    "layers.ring_membership": "edge_index:symmetric n:nodes max_length:limit",
    "layers.chordless_cycles": "edge_index:symmetric n:nodes max_length:limit",
    "layers.substructure_membership": "edge_index:symmetric n:nodes patterns:patterns induced:flag?",
    "layers.membership": "groups:groups n:nodes",
    "layers.laplacian_identifiers": "edge_index:symmetric n:nodes dim:count which:which? batch:batch? dtype:dtype?",
    "layers.orthogonal_identifiers": "n:nodes dim:count batch:batch? generator:generator? dtype:dtype? device:device?",
    "layers.near_orthogonal_identifiers": "n:nodes dim:count generator:generator? dtype:dtype? device:device?",
    "layers.perturb_identifiers": "identifiers:rows batch:batch? sign_flip:flag? dropout:probability? "
    "generator:generator?",
    "layers.simplicial_attention": "keys:keys values:values pair_mask:pairs? causal:flag? form:form? "
    "lower_orders:flag?",
    "layers.simplicial_path_attention": "keys:keys values:values neighbours:neighbours form:form?",
    "structures.batches_by_size": "sizes:sizes batch_size:count padding:padding? generator:generator?",
    "structures.join_graphs": "graphs:graphs",
    "structures.joint": "mask:mask order:order",
    "structures.on_features": "function:function x:anything",
    "structures.PaddedGraphs.of": "x:rows batch:batch",
    "structures.Graph": "edge_index:edges num_nodes:nodes",
    "structures.HyperedgePlan": "indices:tuples num_nodes:nodes batch:batch?",
    "structures.Hyperedges": "indices:tuples values:hyperedge_values num_nodes:nodes batch:batch?",
    "structures.Hyperedges.from_graph": "x:rows edge_index:edges edge_attr:attributes? batch:batch?",
    "structures.Hyperedges.from_dense": "x:dense mask:node_mask?",
    "optim.RiemannianAdam": "params:parameters lr:lr? betas:betas? eps:eps? weight_decay:radius? amsgrad:flag? "
    "stabilize:stabilize?",
    "optim.RiemannianAdam.step": "points:table gradient:gradient lr:lr? betas:betas? eps:eps? weight_decay:radius? "
    "amsgrad:flag? -> points",
    "optim.RiemannianSGD": "params:parameters lr:lr momentum:radius? weight_decay:radius? stabilize:stabilize?",
    "theory.lipschitz_bound": "layer:attention radius:radius tokens:count theorem:theorem?",
    "theory.local_lipschitz": "layer:attention x:tokens form:local_form?",
    "theory.measure_lipschitz": "layer:attention radius:positive tokens:count features:told? starts:one ascend:one "
    "steps:few seed:seed?",
    "theory.collapse_bound": "layers:attentions x:tokens form:collapse_form?",
    "theory.measure_collapse": "layers:attentions x:tokens",
    "theory.hyperbolic_collapse_bound": "queries:radius keys:radius values:radius scale:positive",
    "theory.certify": "model:transformation radius:positive features:four? starts:few steps:few generator:generator?",
    "theory.stretch": "layer:transformation x:few_points metric:metric?",
    "theory.measure_stretch": "layer:transformation radius:positive features:four starts:one steps:few "
    "generator:generator?",
    "theory.distance_scaling": "layer:transformation x:points_apart",
    "theory.basis_approximation_error": "order:one nodes:nodes a:positive dtype:dtype?",
    "theory.certify_node": "model:hypformer x:features edge_index:symmetric node:node radius:reach victim:node? "
    "target:class? threat:threat?",
    "theory.margin_bounds": "model:hypformer x:features edge_index:symmetric nodes:some_nodes radius:reach "
    "target:labels threat:threat?",
    "theory.certified_radius": "model:hypformer x:features edge_index:symmetric nodes:some_nodes target:labels? "
    "threat:threat? limit:positive? cap:flag?",
    "theory.certified_accuracy": "model:hypformer x:features edge_index:symmetric nodes:some_nodes labels:labels "
    "radii:radii threat:threat?",
    "theory.select": "claims:claims?",
    "theory.judge": "claim:name source:name trials:trials dtype:dtype? seed:seed?",
}


def stepped(points: Tensor, gradient: Tensor, **options: Any) -> Tensor:
    """Points after three steps of Riemannian Adam with one gradient."""
    parameter = learned(points.clone(), Lorentz(-1.0, dtype=points.dtype))
    optimizer = RiemannianAdam([parameter], **options)
    for _ in range(3):
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


def bounded(layer: Any, **options: Any) -> float:
    """The bound, whose function is chosen by the class of the first argument, which has no name."""
    return lipschitz_bound(layer, **options)


def density(loc: Tensor, scale: Tensor, manifold: Lorentz, value: Tensor) -> Tensor:
    """The logarithm of a wrapped normal density."""
    return WrappedNormal(loc, scale, manifold).log_prob(value)


def margins(model: Any, x: Any, edge_index: Any, **options: Any) -> Tensor:
    """The certified margins of the other classes, the least number where there is no bound."""
    found = certify_node(model, x, edge_index, **options)
    others = torch.arange(len(found.margins)) != found.target
    return torch.stack([found.margins, found.cap])[:, others].clamp(min=torch.finfo(torch.float64).min)


def bounds(model: Any, x: Any, edge_index: Any, nodes: Any, radius: Any, target: Any, **options: Any) -> Tensor:
    """The bounds of the other classes, the least number where there is none."""
    found = margin_bounds(model, x, edge_index, nodes, radius, target, **options)
    return found.scatter(1, target.long()[:, None], 0.0).clamp(min=torch.finfo(torch.float64).min)


# What is called where the name alone cannot be.
_IN_PLACE_OF = {
    "theory.certify_node": margins,
    "theory.margin_bounds": bounds,
    "optim.RiemannianAdam.step": stepped,
    "theory.lipschitz_bound": bounded,
    "manifolds.WrappedNormal.log_prob": density,
}


@dataclass(frozen=True)
class Target:
    """A public name and how a call of it is drawn.

    Attributes:
        name: the public name.
        draw: makes a call from choices.
        weight: how often it is called, relative to others.
        opening: makes the first choices, which calls share where something is built for them.
    """

    name: str
    draw: Callable[[Source], Call]
    weight: float = 1.0
    opening: Callable[[Source], Any] = lambda source: None


def method(name: str) -> Target:
    """The target of a method of the manifold."""
    row, _, points = METHODS[name].partition(" -> ")

    def draw(source: Source) -> Call:
        fate = source.pick(("valid", "wrong", "doubtful", "valid", "wrong", "wrong"))
        drawn = scene(source)
        kinds = _drawn_arguments(drawn, row, every=fate != "valid")
        manifold = drawn.manifold
        call = Call(
            f"Lorentz.{name}",
            getattr(manifold, name),
            {argument: drawn.seen[argument] for argument in kinds},
            "manifold." + name,
            (f"manifold = {literal(manifold)}",),
            on=manifold if points else None,
            learned=(manifold.curvature_parameter.log_ratio,),
        )
        optional = {argument for argument, kind in _parsed(row).items() if kind.endswith("?")}
        settle(call, drawn, kinds, fate, optional)
        return call

    return Target(f"Lorentz.{name}", draw, 2.0)


def function(path: str) -> Target:
    """The target of a public function."""
    row, name = FUNCTIONS[path], path.partition(".")[2]
    row, _, points = row.partition(" -> ")
    called = _IN_PLACE_OF.get(path) or attrgetter(path)(holonomy)
    optional = {argument for argument, kind in _parsed(row).items() if kind.endswith("?")}

    def draw(source: Source) -> Call:
        fate = source.pick(("valid", "wrong", "doubtful", "valid", "wrong", "wrong"))
        drawn = scene(source)
        if points:
            drawn.curvature = -1.0
        kinds = _drawn_arguments(drawn, row, every=fate != "valid")
        arguments = {argument: drawn.seen[argument] for argument in kinds}
        call = Call(name, called, arguments, path, on=drawn.manifold if points else None)
        # Bounds are read, not trained.
        call.differentiable = not path.startswith("theory")
        settle(call, drawn, kinds, fate, optional)
        return call

    # A certificate of a whole model takes as long as a hundred calls of a layer.
    whole = name.startswith(("certified", "certify_node", "margin_bounds"))
    return Target(name, draw, 0.02 if whole else 0.2 if path.startswith("theory") else 1.0)


def settle(call: Call, drawn: Scene, kinds: Mapping[str, Kind], fate: str, optional: set[str]) -> None:
    """Make one argument, seldom two, wrong or doubtful, or ask for gradients and a second evaluation."""
    source = drawn.source
    if fate == "valid":
        call.twice = source.rarely(6)
        if source.below(2):
            call.arguments = {name: _asking(value) for name, value in call.arguments.items()}
        return
    spoiled: dict[str, str] = {}
    for _ in range(1 + (fate == "wrong" and source.rarely(8))):
        if not call.arguments:
            break
        name = source.pick(list(call.arguments))
        changes = kinds[name].wrong if fate == "wrong" else kinds[name].doubtful
        if not changes or name in spoiled:
            continue
        how = source.pick(list(changes))
        # Two tensors that are longer or shorter alike fit each other.
        if (how == "none" and name in optional) or how in spoiled.values():
            continue
        changed = changes[how](drawn, call.arguments[name])
        if changed is not NotImplemented:
            call.arguments[name] = changed
            spoiled[name] = how
    call.wrong, call.doubtful = (spoiled, {}) if fate == "wrong" else ({}, spoiled)


def _asking(value: Any) -> Any:
    """A tensor as one that asks for gradients, in the same place of memory."""
    if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
        return value.detach().requires_grad_()
    return value


def _parsed(row: str) -> dict[str, str]:
    return dict(part.split(":") for part in row.split())


def _drawn_arguments(drawn: Scene, row: str, *, every: bool) -> dict[str, Kind]:
    """Draw the arguments of a row into the scene, and return their kinds."""
    kinds = {}
    for name, kind in _parsed(row).items():
        if kind.endswith("?") and not drawn.source.below(2) and not every:
            continue
        kinds[name] = KINDS[kind.removesuffix("?")]
        drawn.seen[name] = kinds[name].valid(drawn)
    return kinds
