"""Wrong calls of everything that is public get one sentence of ours: the argument, what it must be, what came."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import geoopt
import numpy as np
import pytest
import torch
from torch import nn

import holonomy
import holonomy.layers
import holonomy.manifolds
import holonomy.models
import holonomy.structures

# Without their types, which these calls are against.
layers: Any = holonomy.layers
manifolds: Any = holonomy.manifolds
models: Any = holonomy.models
structures: Any = holonomy.structures
Lorentz: Any = holonomy.manifolds.Lorentz

NAN = math.nan
M: Any = Lorentz()
OTHER: Any = geoopt.Lorentz()
X = torch.ones(4, 6)  # tokens, or nodes
P = M.lift(X)
LONG, NUMPY, WIDE, LIST = torch.ones(4, 6, dtype=torch.int64), np.ones((4, 6)), torch.ones(4, 7), X.tolist()
E = torch.tensor([[0, 1, 2], [1, 0, 1]])
PAIRS = torch.ones(1, 4, 4, 3)
CODES = torch.zeros(1, 4, 4, dtype=torch.int64)
MASK, SHORT, FLOATS = torch.zeros(4, dtype=torch.bool), torch.zeros(3, dtype=torch.bool), torch.zeros(4)
EDGES = structures.Hyperedges(E.T, torch.ones(3, 6), 4)


def hypformer(**options: Any) -> Any:
    return models.Hypformer(6, 8, 2, **options)


def tokengt(**options: Any) -> Any:
    return models.TokenGT(6, 8, 2, **options)


def layer() -> Any:
    return layers.SimplicialAttention(6, 2)


# The argument that the sentence must name, and the call.
CALLS: dict[str, list[tuple[str, Callable[[], object]]]] = {
    "manifolds": [
        ("curvature", lambda: manifolds.Curvature("flat")),
        ("curvature", lambda: Lorentz(1.0)),
        ("curvature", lambda: Lorentz(0.0)),
        ("curvature", lambda: Lorentz(NAN)),
        ("curvature", lambda: Lorentz(-math.inf)),
        ("curvature", lambda: Lorentz(None)),
        ("curvature", lambda: Lorentz(curvature=True)),
        ("curvature", lambda: Lorentz(torch.tensor([-1.0, -2.0]))),
        ("curvature", lambda: Lorentz(torch.tensor(-1.0, requires_grad=True))),
        ("dtype", lambda: Lorentz(-1.0, dtype=torch.int64)),
        ("dtype", lambda: Lorentz(-1.0, dtype="float32")),
        ("space", lambda: M.lift(LONG)),
        ("space", lambda: M.lift(NUMPY)),
        ("space", lambda: M.lift(1.0)),
        ("x", lambda: M.space(NUMPY)),
        ("x", lambda: M.time(LONG)),
        ("x", lambda: M.dist(P.long(), P.long())),
        ("x", lambda: M.dist(P.numpy(), P.numpy())),
        ("y", lambda: M.dist(P, P.numpy())),
        ("y", lambda: M.dist(P, P[:, :5])),
        ("y", lambda: M.dist(P, P[:3])),
        ("x", lambda: M.dist(torch.tensor(1.0), P)),
        ("x", lambda: M.dist0(P.tolist())),
        ("x", lambda: M.cdist(P[0], P)),
        ("y", lambda: M.cdist(P, P[:, :5])),
        ("u", lambda: M.expmap(P, P[:, :5])),
        ("u", lambda: M.expmap0(LONG)),
        ("t", lambda: M.geodesic_unit("far", P, P)),
        ("y", lambda: M.logmap(P, WIDE[:, :5])),
        ("y", lambda: M.logmap0(NUMPY)),
        ("v", lambda: M.transp(P, P, P[:, 1:])),
        ("u", lambda: M.transp0(P, LONG)),
        ("v", lambda: M.proju(P, X)),
        ("u", lambda: M.egrad2rgrad(P, X)),
        ("v", lambda: M.inner(P, P, X)),
        ("x", lambda: M.projx(LONG)),
        ("x", lambda: M.to_poincare(NUMPY)),
        ("p", lambda: M.from_poincare(LONG)),
        ("x", lambda: M.to_klein(NUMPY)),
        ("p", lambda: M.from_klein(LONG)),
        ("x", lambda: M.centroid(LONG)),
        ("x", lambda: M.centroid(P[0])),
        ("weights", lambda: M.centroid(P, torch.ones(3))),
        ("weights", lambda: M.centroid(P, torch.ones(4, dtype=torch.int64))),
        ("weights", lambda: M.centroid(P, [1.0] * 4)),
        ("to", lambda: M.rescale(P, OTHER)),
        ("to", lambda: M.rescale(P, -2.0)),
        ("x", lambda: M.rescale(NUMPY, M)),
        ("to", lambda: M.ratio(-2.0)),
        ("size", lambda: M.random(4, -3)),
        ("size", lambda: M.random(4, 2.5)),
        ("size", lambda: M.random(4, 0)),
        ("size", M.random),
        ("size", lambda: M.origin("3")),
        ("std", lambda: M.random(4, 3, std=-1.0)),
        ("num_embeddings", lambda: manifolds.LorentzEmbedding(0, 2, M)),
        ("embedding_dim", lambda: manifolds.LorentzEmbedding(3, 2.0, M)),
        ("embedding_dim", lambda: manifolds.LorentzEmbedding(3, True, M)),
        ("manifold", lambda: manifolds.LorentzEmbedding(3, 2, OTHER)),
        ("std", lambda: manifolds.LorentzEmbedding(3, 2, M, std=-1.0)),
        ("std", lambda: manifolds.LorentzEmbedding(3, 2, M, std=NAN)),
        ("index", lambda: manifolds.LorentzEmbedding(3, 2, M)(torch.tensor([0.0]))),
        ("index", lambda: manifolds.LorentzEmbedding(3, 2, M)(torch.tensor([3]))),
        ("index", lambda: manifolds.LorentzEmbedding(3, 2, M)([0, 1])),
        ("index", lambda: manifolds.LorentzEmbedding(3, 2, M)(torch.tensor([-1]))),
        ("num", lambda: manifolds.LorentzPoints(-1, 2, M)),
        ("dim", lambda: manifolds.LorentzPoints(2, "2", M)),
    ],
    "hyperbolic linear": [
        ("in_features", lambda: layers.HTC(0, 4, M)),
        ("in_features", lambda: layers.HTC(6.0, 4, M)),
        ("out_features", lambda: layers.HTC(6, -1, M)),
        ("out_features", lambda: layers.HTC(6, True, M)),
        ("manifold_in", lambda: layers.HTC(6, 4, -1.0)),
        ("manifold_in", lambda: layers.HTC(6, 4, OTHER)),
        ("manifold_out", lambda: layers.HTC(6, 4, M, OTHER)),
        ("manifold_out", lambda: layers.HTC(6, 4, M, Lorentz)),
        ("x", lambda: layers.HTC(6, 4, M)(X)),
        ("x", lambda: layers.HTC(6, 4, M)(P.double())),
        ("x", lambda: layers.HTC(6, 4, M)(P.long())),
        ("x", lambda: layers.HTC(6, 4, M)(P.numpy())),
        ("x", lambda: layers.HTC(6, 4, M)(torch.tensor(1.0))),
        ("x", lambda: layers.TangentLinear(6, 4, M)(P.double())),
        ("x", lambda: layers.TangentLinear(6, 4, M)(X)),
        ("in_features", lambda: layers.TangentLinear(-6, 4, M)),
        ("x", lambda: layers.FullyLorentzLinear(6, 4, M)(P.double())),
        ("activation", lambda: layers.FullyLorentzLinear(6, 4, M, activation="relu")),
        ("scale", lambda: layers.FullyLorentzLinear(6, 4, M, scale=-1.0)),
        ("scale", lambda: layers.FullyLorentzLinear(6, 4, M, scale=NAN)),
        ("x", lambda: layers.ExpMapHTC(6, 4, M)(LONG)),
        ("x", lambda: layers.ExpMapHTC(6, 4, M)(X.double())),
        ("x", lambda: layers.ExpMapHTC(6, 4, M)(P)),
        ("x", lambda: layers.HypMLR(6, 3, M)(X)),
        ("classes", lambda: layers.HypMLR(6, 0, M)),
        ("manifold", lambda: layers.HypMLR(6, 3, OTHER)),
        ("x", lambda: layers.HypPrototypes(6, 3, M)(P.numpy())),
        ("x", lambda: layers.HypPrototypes(6, 3, M)(P.long())),
        ("manifold", lambda: layers.HypPrototypes(6, 3, -1.0)),
    ],
    "hyperbolic refinement": [
        ("function", lambda: layers.HRC(None, M)),
        ("function", lambda: layers.HRC(nn.ReLU, M)),
        ("manifold_in", lambda: layers.HRC(torch.relu, -1.0)),
        ("x", lambda: layers.HRC(torch.relu, M)(LONG)),
        ("x", lambda: layers.HRC(torch.relu, M)(P.numpy())),
        ("x", lambda: layers.HRC(torch.relu, M)(torch.tensor(1.0))),
        ("function", lambda: layers.HypActivation("relu", M)),
        ("features", lambda: layers.HypLayerNorm(0, M)),
        ("eps", lambda: layers.HypLayerNorm(6, M, eps=-1.0)),
        ("eps", lambda: layers.HypLayerNorm(6, M, eps="small")),
        ("x", lambda: layers.HypLayerNorm(6, M)(X)),
        ("x", lambda: layers.HypLayerNorm(6, M)(P.double())),
        ("momentum", lambda: layers.HypBatchNorm(6, M, momentum=2.0)),
        ("x", lambda: layers.HypBatchNorm(6, M)(X)),
        ("x", lambda: layers.HypBatchNorm(6, M)(P.double())),
        ("p", lambda: layers.HypDropout(1.5, M)),
        ("p", lambda: layers.HypDropout("half", M)),
        ("p", lambda: layers.HypDropout(True, M)),
        ("p", lambda: layers.HypDropout(NAN, M)),
        ("points", layers.HypConcat(M)),
        ("points", lambda: layers.HypConcat(M)(P, P[:3])),
        ("points", lambda: layers.HypConcat(M)(P, P.numpy())),
        ("points", lambda: layers.HypConcat(M)([P, P])),
        ("epsilon", lambda: layers.HypResidual(M, epsilon=NAN)),
        ("branch", lambda: layers.HypResidual(M)(P, X)),
        ("x", lambda: layers.HypResidual(M)(P.numpy(), P)),
        ("epsilon", lambda: layers.HypPositionalEncoding(6, M, epsilon="one")),
        ("x", lambda: layers.HypPositionalEncoding(6, M)(X)),
    ],
    "hyperbolic attention": [
        ("features", lambda: layers.HypLinearAttention(6, 4, M)),
        ("heads", lambda: layers.HypLinearAttention(6, 0, M)),
        ("heads", lambda: layers.HypLinearAttention(6, 2.0, M)),
        ("power", lambda: layers.HypLinearAttention(6, 2, M, power=-1.0)),
        ("power", lambda: layers.HypLinearAttention(6, 2, M, power="two")),
        ("average", lambda: layers.HypLinearAttention(6, 2, M, average="mean")),
        ("manifold_hidden", lambda: layers.HypLinearAttention(6, 2, M, manifold_hidden=OTHER)),
        ("x", lambda: layers.HypLinearAttention(6, 2, M)(P[0])),
        ("x", lambda: layers.HypLinearAttention(6, 2, M)(P.double())),
        ("key_padding_mask", lambda: layers.HypLinearAttention(6, 2, M)(P, FLOATS)),
        ("key_padding_mask", lambda: layers.HypLinearAttention(6, 2, M)(P, SHORT)),
        ("key_padding_mask", lambda: layers.HypLinearAttention(6, 2, M)(P, MASK.numpy())),
        ("key_padding_mask", lambda: layers.HypLinearAttention(6, 2, M)(P, MASK.tolist())),
        ("similarity", lambda: layers.HypSoftmaxAttention(6, 2, M, similarity="cosine")),
        ("dropout", lambda: layers.HypSoftmaxAttention(6, 2, M, dropout=-0.1)),
        ("key_padding_mask", lambda: layers.HypSoftmaxAttention(6, 2, M)(P, MASK[None])),
        ("order", lambda: layers.HypSimplicialAttention(6, 2, M, order=0)),
        ("form", lambda: layers.HypSimplicialAttention(6, 2, M, form="sum")),
        ("x", lambda: layers.HypSimplicialAttention(6, 2, M)(P.double())),
    ],
}


def complaint(name: str, call: Callable[[], object]) -> str:
    """What is wrong with the answer to a wrong call, if anything."""
    try:
        call()
    except (TypeError, ValueError) as error:
        raised, said = Path(traceback.extract_tb(error.__traceback__)[-1].filename), str(error)
        if Path(holonomy.__file__).parent not in raised.parents:
            return f"raised by {raised.name}: {said}"
        return "" if re.search(rf"\b{name}\b", said) and " must " in said and said.endswith(".") else f"says: {said}"
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("part", CALLS)
def test_a_wrong_call_gets_one_sentence_that_names_the_argument(part: str) -> None:
    complaints = {f"{i} {name}": complaint(name, call) for i, (name, call) in enumerate(CALLS[part])}
    assert not {call: said for call, said in complaints.items() if said}
