"""Hyperbolic graph convolutions, the model of them, and decoders of pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holonomy import layers, models
from tests.registry.case import Case, Setting

__all__ = ["CASES"]


def _plain(setting: Setting) -> tuple[Tensor, ...]:
    return setting.points(setting.nodes, setting.features), setting.edges()


def _weighted(setting: Setting) -> tuple[Tensor, ...]:
    points, edges = _plain(setting)
    loop = torch.full((2, 1), setting.nodes - 1, device=setting.device)
    edges = torch.cat([edges, loop, edges[:, :1]], dim=1)  # a loop, and an edge that is listed twice
    return points, edges, torch.rand(edges.shape[1], **setting.factory) + 0.1


def _raw(setting: Setting) -> tuple[Tensor, ...]:
    return setting.vectors(setting.nodes, setting.features), setting.edges()


def _pairs(setting: Setting) -> tuple[Tensor, ...]:
    return tuple(setting.points(setting.nodes, setting.features) for _ in range(2))


CASES: list[Case] = [
    Case(
        kind,
        options,
        lambda s, o, kind=kind, target=target: kind(
            s.features, 6, s.manifold(0), None if target == 0 else s.manifold(target), **o, **s.factory
        ),
        inputs,
        f"to {target}{', weighted' * (inputs is _weighted)}",
        "manifold_out",
        any_radius=True,
    )
    for kind, options, target, inputs in (
        (layers.HGCNConv, {"bias": True}, 0, _plain),
        (layers.HGCNConv, {"bias": False, "activation": torch.tanh}, 1, _weighted),
        # Without a bias, which at curvature -100 leads to rapidity 7: there loops lose the digits of local logarithms.
        (layers.HGCNConv, {"aggregation": "local", "bias": False}, 0, _weighted),
        (layers.HGCNConv, {"aggregation": "local", "bias": False}, 1, _plain),
        (layers.HGATConv, {"heads": 1}, 0, _weighted),
        (layers.HGATConv, {"heads": 3, "bias": False}, 1, _plain),
        (layers.HGATConv, {"heads": 2, "activation": torch.tanh}, 0, _weighted),
        (layers.LGCNConv, {"scale": 2.0}, 0, _weighted),
        (layers.LGCNConv, {"bias": False, "activation": torch.tanh}, 1, _plain),
        (layers.LGCNConv, {"linear": "htc", "bias": False}, 1, _weighted),
        (layers.LGCNConv, {"linear": "tangent", "activation": torch.tanh}, 1, _plain),
    )
]
CASES += [
    Case(models.HGCN, options, lambda s, o: models.HGCN(s.features, 6, 3, **o, **s.factory), _raw, any_radius=True)
    for options in (
        {"conv": "hgcn"},
        {"conv": "hgcn", "layers": 1, "decoder": "mlr", "dropout": 0.4},
        {"conv": "hgat", "heads": 2, "layers": 1, "decoder": "prototypes", "curvature": -0.3},
        {"conv": "lgcn", "activation": nn.functional.silu, "dropout": 0.3, "learnable_curvature": False},
        {"conv": "lgcn", "layers": 3, "level": "node"},
        {"conv": "lgcn", "linear": "tangent"},
    )
]
CASES.append(
    Case(
        models.HGCN,
        {"conv": "lgcn", "layers": 1},
        lambda s, o: models.HGCN(s.features, 6, **o, **s.factory),
        _raw,
        "points",
        "manifold_out",
        any_radius=True,
    )
)
CASES += [
    Case(kind, options, lambda s, o, kind=kind, how=how: kind(s.manifold(0), **o, **how(s)), _pairs, any_radius=True)
    for kind, options, how in (
        (layers.FermiDiracDecoder, {"temperature": 0.5}, lambda s: s.factory),
        (layers.FermiDiracDecoder, {"radius": -1.0}, lambda s: s.factory),
        (layers.EntailmentCones, {"constant": 0.1}, lambda s: {}),
        (layers.EntailmentCones, {"constant": 0.5}, lambda s: {}),
    )
]
