"""Hyperbolic graph convolutional networks: HGCN, its attention, and the fully Lorentzian one, as one model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal, cast

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._shapes import Float, Int
from holonomy.layers import HGATConv, HGCNConv, HypDropout, LGCNConv
from holonomy.layers.hyperbolic.classifier import decoder_of
from holonomy.layers.hyperbolic.refinement import drop_some
from holonomy.manifolds import Lorentz
from holonomy.models.levels import centroids, level_of
from holonomy.ops.heads import head_count
from holonomy.ops.propagation import check_graph
from holonomy.structures import Graph


class HGCN(nn.Module):
    r"""A hyperbolic graph convolutional network (Chami et al. 2019), with a choice of convolutions.

    Features become points by the exponential map at the origin, convolutions lead from manifold to manifold, each of
    its own curvature, and the last points are decoded:

    .. math:: x^0 = \exp_o^{\kappa_0}(x), \qquad x^{l} = \mathrm{conv}^{\kappa_{l-1} \to \kappa_l}(x^{l-1}) .

    It is a model of its own and no ``graph_encoder`` of Hypformer. Without ``out_features`` it has no decoder and
    returns points of ``manifold_out``, for link prediction with :class:`~holonomy.layers.FermiDiracDecoder`.

    Args:
        in_features: number of features of a node.
        hidden_features: dimension of the spaces between.
        out_features: number of classes, or of regression targets; if left out, the result is points.
        conv: ``"hgcn"`` (:class:`~holonomy.layers.HGCNConv`), ``"hgat"`` (:class:`~holonomy.layers.HGATConv`) or
            ``"lgcn"`` (:class:`~holonomy.layers.LGCNConv`).
        linear: the map of :class:`~holonomy.layers.LGCNConv`, ``"lorentz"``, ``"htc"`` or ``"tangent"``; with
            ``"lgcn"`` only.
        layers: number of convolutions.
        heads: attention heads, a divisor of ``hidden_features``; with ``"hgat"`` only.
        dropout: probability that a space coordinate entering a convolution is dropped in training.
        activation: between convolutions: a function of tangent vectors, or with ``"lgcn"`` of the points that enter the
            second and later linear maps.
        curvature: the initial curvature of every manifold.
        learnable_curvature: whether the curvatures receive gradients. Where a logarithm at the origin follows an
            exponential map there, the curvature has no effect, and its gradient is rounding: the last one with
            ``"hgcn"`` and ``"hgat"``, ``level="node"`` and the linear decoder, the first one with
            ``linear="tangent"``.
        level: what a row of the result belongs to, ``"node"`` (the default) or ``"graph"``. A model made without it and
            called with ``batch`` returns graphs in this release, with a FutureWarning.
        decoder: ``"linear"`` on the logarithm at the origin, ``"mlr"`` for hyperbolic multinomial logistic regression,
            or ``"prototypes"``: one learned point a class. With ``out_features`` only.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        TypeError: if an argument is of another type than it says.
        ValueError: if a size, probability or choice is none of the allowed, ``heads`` is given without ``"hgat"``,
            ``linear`` without ``"lgcn"``, or ``decoder`` without ``out_features``.

    >>> path = torch.stack([torch.arange(9), torch.arange(1, 10)])
    >>> edge_index = torch.cat([path, path.flip(0)], dim=1)
    >>> model = HGCN(4, 8, 2, conv="lgcn")
    >>> model(torch.randn(10, 4), edge_index).shape
    torch.Size([10, 2])
    >>> HGCN(4, 8)(torch.randn(10, 4), edge_index).shape  # points
    torch.Size([10, 9])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        conv: Literal["hgcn", "hgat", "lgcn"] = "hgcn",
        linear: Literal["lorentz", "htc", "tangent"] = "lorentz",
        layers: int = 2,
        heads: int = 1,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        curvature: float = -1.0,
        learnable_curvature: bool = True,
        level: Literal["graph", "node"] | None = None,
        decoder: Literal["linear", "mlr", "prototypes"] = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(learnable_curvature=learnable_curvature)
        self.in_features = checks.positive_int("in_features", in_features)
        self.conv = checks.one_of("conv", conv, ("hgcn", "hgat", "lgcn"))
        head_count(hidden_features, heads if conv == "hgat" else 1, "hidden_features")
        checks.function("activation", activation)
        checks.in_range("dropout", dropout, 0.0, 1.0)
        checks.one_of("decoder", decoder, ("linear", "mlr", "prototypes"))
        if out_features is None and decoder != "linear":
            raise ValueError(f"decoder must be left out without out_features, got {decoder!r}.")
        if level is not None:
            checks.one_of("level", level, ("graph", "node"))
        self.level: Literal["graph", "node"] | None = level
        if checks.positive_int("heads", heads) != 1 and conv != "hgat":
            raise ValueError(f"heads must be 1 with conv {conv!r}, which has none, got {heads}.")
        if checks.one_of("linear", linear, ("lorentz", "htc", "tangent")) != "lorentz" and conv != "lgcn":
            raise ValueError(f"linear must be left out with conv {conv!r}, which has a map of its own, got {linear!r}.")
        widths = [in_features, *[hidden_features] * checks.positive_int("layers", layers)]
        made = [
            Lorentz(curvature, learnable=learnable_curvature, device=device, dtype=dtype) for _ in range(layers + 1)
        ]
        kinds = {"hgcn": HGCNConv, "hgat": partial(HGATConv, heads=heads), "lgcn": partial(LGCNConv, linear=linear)}
        # Between convolutions: behind all but the last, or before all but the first.
        between = [activation] * (layers - 1)
        activations = [None, *between] if conv == "lgcn" else [*between, None]
        self.convolutions = nn.ModuleList(
            kinds[conv](*sizes, *spaces, activation=function, device=device, dtype=dtype)
            for sizes, spaces, function in zip(pairwise(widths), pairwise(made), activations, strict=True)
        )
        self.drops = nn.ModuleList(HypDropout(dropout, manifold) for manifold in made[:-1])
        self.manifold_in, self.manifold_out = made[0], made[-1]
        # Kept apart from the decoder's class, so that another module may stand in its place.
        self.decodes_points = decoder != "linear" or out_features is None
        self.decoder: nn.Module = nn.Identity()
        if out_features is not None:
            checks.positive_int("out_features", out_features)
            self.decoder = decoder_of(decoder, hidden_features, out_features, made[-1], device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "nodes dim_in"],
        edge_index: Int[Tensor, "2 edges"] | Graph,
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | None = None,
        edge_weight: Float[Tensor, " edges"] | None = None,
        num_graphs: int | None = None,
    ) -> Float[Tensor, "rows out"]:
        """Scores of every node, or of every graph; points without ``out_features``.

        Args:
            x: node features ``(n, in_features)``.
            edge_index: ``(2, m)``, each edge in both directions, or a :class:`~holonomy.structures.Graph`.
            batch: the graph of each node ``(n,)``, numbered from zero; one graph if left out.
            edge_attr: is not read.
            edge_weight: nonnegative numbers ``(m,)``; ones if left out.
            num_graphs: their number, where some at the end have no node.

        Returns:
            ``(n, out_features)``, or ``(graphs, out_features)`` at the level of graphs, each decoded at the Lorentzian
            centroid of its nodes. Without ``out_features`` the points themselves, ``(rows, hidden_features + 1)``.

        Raises:
            ValueError: if shapes do not fit, or ``num_graphs`` is given without ``batch``.
        """
        checks.unread(self, "pass nonnegative numbers as edge_weight", edge_attr=edge_attr)
        checks.only_with_batch(num_graphs, batch)
        check_graph(x, edge_index, batch, edge_weight)
        points = self.embed(x, edge_index, edge_weight=edge_weight)
        if level_of(self, self.level, batch) == "graph":
            points = centroids(points, self.manifold_out, batch, num_graphs)
        elif num_graphs is not None:
            checks.number_of_graphs(batch, num_graphs)
        return self.decoder(points if self.decodes_points else self.manifold_out.logmap0(points)[..., 1:])

    def embed(
        self,
        x: Float[Tensor, "nodes dim_in"],
        edge_index: Int[Tensor, "2 edges"] | Graph,
        *,
        edge_weight: Float[Tensor, " edges"] | None = None,
    ) -> Float[Tensor, "nodes ambient"]:
        """What the decoder reads of each node: points ``(n, hidden_features + 1)`` of ``manifold_out``.

        Arguments are those of :meth:`forward`.
        """
        checks.last_axis("x", x, self.in_features, "in_features")
        points = self.manifold_in.expmap0(nn.functional.pad(numerics.nan_if_infinite(x), (1, 0)))
        for drop, convolution in zip(self.drops, self.convolutions, strict=True):
            points = convolution(drop_some(cast("HypDropout", drop), points), edge_index, edge_weight)
        return points

    def curvatures(self) -> dict[str, Float[Tensor, " 1"]]:
        """The curvature of each manifold: ``"input"``, then behind each convolution ``"layer0"``, ``"layer1"``, ..."""
        behind = [*[cast("HypDropout", drop).manifold_in for drop in self.drops][1:], self.manifold_out]
        named = {"input": self.manifold_in.curvature}
        return named | {f"layer{depth}": manifold.curvature for depth, manifold in enumerate(behind)}
