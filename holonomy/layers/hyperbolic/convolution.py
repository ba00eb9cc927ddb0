r"""Graph convolutions between hyperboloids, called as those of PyTorch Geometric: ``(x, edge_index, edge_weight)``.

Points are ambient, ``(n, d + 1)``, time first. Messages go from ``edge_index[0]`` to ``edge_index[1]``; every node has
a loop of weight one unless the edges list one, and an edge that is listed twice counts twice. With :math:`w_{ij}` the
weight of the edge from j to i, the average at i runs over its neighbours and itself.

========================= ================================== ====================================================
class                     linear map                         average
========================= ================================== ====================================================
:class:`HGCNConv`         tangent space, at the origin       weights :math:`w_{ij}`, in a tangent space
:class:`HGATConv`         tangent space, at the origin       weights :math:`w_{ij} e^{-d(h_i, h_j)}`, at the origin
:class:`LGCNConv`         fully Lorentz (Hypformer eq. 7)*   weights :math:`w_{ij}`, Lorentzian midpoint (eq. 4)
========================= ================================== ====================================================

\\* or another, by ``linear``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks, numerics
from holonomy._shapes import Float, Int
from holonomy.layers.hyperbolic.linear import HTC, FullyLorentzLinear, TangentLinear
from holonomy.layers.hyperbolic.refinement import HypActivation, change_curvature, from_tangent, resolve, translated
from holonomy.manifolds import Lorentz, hyperboloid
from holonomy.manifolds.hyperboloid.midpoints import midpoint_of_sum
from holonomy.ops.heads import head_count
from holonomy.ops.propagation import averaging, check_graph, edge_list, looped_edges
from holonomy.structures import Graph

# The initial lambda of FullyLorentzLinear.
_SCALE = 10.0


class _TangentConvolution(nn.Module):
    """What HGCN and HGAT share: the linear map, the bias as a translation, and the exponential map to the output."""

    def __init__(
        self,
        sizes: tuple[int, int],
        manifolds: tuple[Lorentz, Lorentz | None],
        *,
        activation: Callable[[Tensor], Tensor] | None,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        checks.flags(bias=bias)
        self.in_features = sizes[0]
        self.manifold_in, self.manifold_out = resolve(*manifolds)
        if activation is not None:
            checks.function("activation", activation)
        self.activation = activation
        self.linear = TangentLinear(*sizes, self.manifold_in, bias=False, device=device, dtype=dtype)
        self.bias = nn.Parameter(torch.zeros(sizes[1], device=device, dtype=dtype)) if bias else None

    def forward(
        self,
        x: Float[Tensor, "nodes dim_in_plus_1"],
        edge_index: Int[Tensor, "2 edges"] | Graph,
        edge_weight: Float[Tensor, " edges"] | None = None,
    ) -> Float[Tensor, "nodes dim_out_plus_1"]:
        """Points ``(n, out_features + 1)`` of ``manifold_out``, one for each node.

        Args:
            x: points ``(n, in_features + 1)`` of ``manifold_in``.
            edge_index: ``(2, m)``, both directions listed, or a :class:`~holonomy.structures.Graph`.
            edge_weight: nonnegative numbers ``(m,)``; ones if left out. A node whose weights are all zero, its loop's
                among them, comes to the origin, or with ``aggregation="local"`` stays where it is.

        Returns:
            The points.
        """
        _check(x, edge_index, edge_weight, self.in_features + 1, getattr(self.linear, "linear", None))
        # h on manifold_in, its average in the tangent space at the origin, then sigma and the exponential map.
        points = self.linear(numerics.nan_if_infinite(x))
        points = points if self.bias is None else translated(points, self.bias, self.manifold_in)
        # Sums over many edges, and gradients that are such sums, need more digits than half precision has.
        wide = points.to(torch.promote_types(points.dtype, torch.float32))
        mean = self._mean(wide, edge_index, edge_weight).to(points.dtype)
        return from_tangent(mean if self.activation is None else self.activation(mean), self.manifold_out)

    def _mean(
        self, points: Tensor, edges: Tensor | Graph, edge_weight: Tensor | None
    ) -> Float[Tensor, "nodes dim_out"]:
        """The average at each node, as a tangent vector at the origin of ``manifold_in``."""
        raise NotImplementedError


class HGCNConv(_TangentConvolution):
    r"""Hyperbolic graph convolution in tangent spaces (Chami et al. 2019, *Hyperbolic Graph Convolutional Networks*).

    .. math::
        h_i &= \big(W \otimes x_i\big) \oplus b, \qquad
        W \otimes x = \exp_o^{\kappa_1}(W \log_o^{\kappa_1} x), \quad x \oplus b = \exp_x^{\kappa_1}(P_{o \to x}\, b)
        \quad \text{(eqs. 6, 7)} \\
        a_i &= \log_o^{\kappa_1}\Big(\exp_{h_i}\big(\textstyle\sum_j \bar w_{ij} \log_{h_i} h_j\big)\Big)
        \quad \text{(eq. 9)}, \qquad
        y_i = \exp_o^{\kappa_2}(\sigma(a_i)) \quad \text{(eq. 10)}

    with :math:`\bar w_{ij} = w_{ij} / \sum_k w_{ik}`. That is ``aggregation="local"``, as printed; ``"origin"``, the
    default of the authors' code and as fast as a Euclidean convolution, averages in the tangent space at the origin,
    :math:`a_i = \sum_j \bar w_{ij} \log_o h_j`. For weights by attention see :class:`HGATConv`.

    Accurate for float32 points up to rapidity 80. A local average is accurate up to the rounding of the points
    :math:`h_i`, which at rapidity r is 1e-7 :math:`e^r` curvature radii.

    Args:
        in_features: dimension of the points that come in.
        out_features: dimension of the points that go out.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        aggregation: ``"origin"`` or ``"local"``, whose tangent space the average is taken in.
        activation: :math:`\sigma`, a function of tangent vectors at the origin; the identity if ``None``.
        bias: learn b.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if an argument is of another type than it says.
        ValueError: if a size is not positive, or ``aggregation`` is neither.

    >>> from holonomy.manifolds import Lorentz
    >>> m, to = Lorentz(-1.0), Lorentz(-0.5)
    >>> edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> HGCNConv(4, 3, m, to, activation=torch.relu)(m.lift(torch.randn(3, 4)), edges).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        aggregation: Literal["origin", "local"] = "origin",
        activation: Callable[[Tensor], Tensor] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes, spaces = (in_features, out_features), (manifold_in, manifold_out)
        super().__init__(sizes, spaces, activation=activation, bias=bias, device=device, dtype=dtype)
        self.aggregation = checks.one_of("aggregation", aggregation, ("origin", "local"))

    def _mean(
        self, points: Tensor, edges: Tensor | Graph, edge_weight: Tensor | None
    ) -> Float[Tensor, "nodes dim_out"]:
        manifold, nodes = self.manifold_in, points.shape[0]
        if self.aggregation == "origin":
            return averaging(edges, nodes, points.dtype, edge_weight)(manifold.logmap0(points)[..., 1:])
        source, target, weight = looped_edges(edge_list(edges), nodes, points.dtype, edge_weight)
        logarithms = hyperboloid.logmap_frame(points[target], points[source], manifold.curvature)
        moved = hyperboloid.expmap_frame(points, _average(logarithms, weight, target, nodes), manifold.curvature)
        return manifold.logmap0(moved)[..., 1:]

    def extra_repr(self) -> str:
        """Where the average is taken, for ``repr``."""
        return f"aggregation={self.aggregation!r}"


class HGATConv(_TangentConvolution):
    r"""Hyperbolic graph attention by distance (Zhang et al. 2021, *Hyperbolic Graph Attention Network*).

    With :math:`h_i = (W \otimes x_i) \oplus b` as in :class:`HGCNConv`,

    .. math::
        \alpha_{ij} = \frac{w_{ij}\, e^{-d(h_i, h_j)}}{\sum_k w_{ik}\, e^{-d(h_i, h_k)}}, \qquad
        y_i = \exp_o^{\kappa_2}\Big(\sigma\big(\textstyle\sum_j \alpha_{ij} \log_o^{\kappa_1} h_j\big)\Big),

    the softmax of negative geodesic distances. Each head has a slice of the tangent vectors at the origin and computes
    the distances of their exponentials; the averages of all heads are concatenated.

    Float32 points keep their digits up to rapidity 80 from the origin. Where two neighbours coincide the distance has
    no derivative: the first counts as zero, the second is nan.

    Args:
        in_features: dimension of the points that come in.
        out_features: dimension of the points that go out, a multiple of ``heads``.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        heads: number of heads.
        activation: :math:`\sigma`, a function of tangent vectors at the origin; the identity if ``None``.
        bias: learn b.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if an argument is of another type than it says.
        ValueError: if a size is not positive, or ``heads`` does not divide ``out_features``.

    >>> from holonomy.manifolds import Lorentz
    >>> m = Lorentz(-1.0)
    >>> edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> HGATConv(4, 6, m, heads=2)(m.lift(torch.randn(3, 4)), edges, torch.tensor([1.0, 1.0, 0.5, 0.5])).shape
    torch.Size([3, 7])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        heads: int = 1,
        activation: Callable[[Tensor], Tensor] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes, spaces = (in_features, out_features), (manifold_in, manifold_out)
        super().__init__(sizes, spaces, activation=activation, bias=bias, device=device, dtype=dtype)
        self.heads = head_count(out_features, heads, "out_features")

    def _mean(
        self, points: Tensor, edges: Tensor | Graph, edge_weight: Tensor | None
    ) -> Float[Tensor, "nodes dim_out"]:
        nodes = points.shape[0]
        source, target, weight = looped_edges(edge_list(edges), nodes, points.dtype, edge_weight)
        tangent = self.manifold_in.logmap0(points)[..., 1:].unflatten(-1, (self.heads, -1))
        # Of one head the points are there already.
        by_head = points[:, None] if self.heads == 1 else self.manifold_in.expmap0(functional.pad(tangent, (1, 0)))
        # A loop has length 0 and no gradient of any order: it is measured between two constant points instead.
        loop, shape = source == target, by_head.shape[1:]
        ends = torch.cat([by_head, by_head.new_zeros(1, *shape), by_head.new_ones(1, *shape)])
        first, second = (torch.where(loop, nodes + i, end) for i, end in enumerate((target, source)))
        distances = torch.where(loop[:, None], 0.0, self.manifold_in.dist(ends[first], ends[second]))
        shares = _softmax(-distances, weight.to(distances.dtype)[:, None], target, nodes)
        messages = tangent[source] * shares[..., None]
        return tangent.new_zeros(tangent.shape).index_add(0, target, messages.to(tangent.dtype)).flatten(-2)

    def extra_repr(self) -> str:
        """Heads, for ``repr``."""
        return f"heads={self.heads}"


class LGCNConv(nn.Module):
    r"""Lorentzian graph convolution: a fully Lorentz linear map, then midpoints (LGCN 2021, HyboNet 2022).

    .. math::
        h_i = \mathrm{FullyLorentzLinear}(x_i), \qquad
        y_i = \frac{\sum_j w_{ij} h_j}{\sqrt{|\kappa_2|}\, \big|\sum_j w_{ij} h_j\big|_{\mathcal L}}

    (Zhang et al. 2021, *Lorentzian Graph Convolutional Networks*; Chen et al. 2022, *Fully Hyperbolic Neural Networks*;
    as Hypformer prints them, eqs. 7 and 4). No tangent space is used: with the linear map left out, any isometry of
    hyperbolic space commutes with it.

    The average is accurate to 1e-6 for points up to rapidity 11, and for coincident points anywhere. The space part of
    the linear map's result has at most length :math:`\lambda`, at first 10, which is rapidity 3 at curvature -1. With
    ``linear="htc"`` or ``"tangent"`` the map is :class:`HTC` or :class:`TangentLinear`, whose results are not bounded
    (the page *Linear maps far from the origin*).

    Args:
        in_features: dimension of the points that come in.
        out_features: dimension of the points that go out.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        linear: the map: ``"lorentz"``, ``"htc"`` or ``"tangent"``.
        activation: h of :class:`FullyLorentzLinear`, a function of the whole point before the linear map; of its space
            part before the other maps.
        scale: the initial :math:`\lambda > 0` of :class:`FullyLorentzLinear`; the other maps have none.
        bias: learn its b.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if an argument is of another type than it says.
        ValueError: if a size or ``scale`` is not positive, ``linear`` is none of the three, or ``scale`` is given
            with another than ``"lorentz"``.

    >>> from holonomy.manifolds import Lorentz
    >>> m, to = Lorentz(-1.0), Lorentz(-0.5)
    >>> edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> LGCNConv(4, 3, m, to)(m.lift(torch.randn(3, 4)), edges).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        linear: Literal["lorentz", "htc", "tangent"] = "lorentz",
        activation: Callable[[Tensor], Tensor] | None = None,
        scale: float = _SCALE,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(bias=bias)
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        self.in_features = checks.positive_int("in_features", in_features)
        sizes, spaces = (in_features, out_features), (manifold_in, manifold_out)
        if activation is not None:
            checks.function("activation", activation)
        self.linear: FullyLorentzLinear | HTC | TangentLinear
        self.activation: HypActivation | None = None
        if checks.one_of("linear", linear, ("lorentz", "htc", "tangent")) == "lorentz":
            self.linear = FullyLorentzLinear(
                *sizes, *spaces, activation=activation, scale=scale, bias=bias, device=device, dtype=dtype
            )
            return
        checks.in_range("scale", scale, 0.0, math.inf)
        if scale != _SCALE:
            raise ValueError(f"scale must be left out with linear={linear!r}, which has none, got {scale}.")
        kind = HTC if linear == "htc" else TangentLinear
        self.linear = kind(*sizes, *spaces, bias=bias, device=device, dtype=dtype)
        self.activation = None if activation is None else HypActivation(activation, manifold_in)

    def forward(
        self,
        x: Float[Tensor, "nodes dim_in_plus_1"],
        edge_index: Int[Tensor, "2 edges"] | Graph,
        edge_weight: Float[Tensor, " edges"] | None = None,
    ) -> Float[Tensor, "nodes dim_out_plus_1"]:
        """Points ``(n, out_features + 1)`` of ``manifold_out``, with the arguments of :class:`HGCNConv`.

        A node whose weights are all zero, its loop's among them, comes to the origin.
        """
        _check(x, edge_index, edge_weight, self.in_features + 1, self._weight())
        x = numerics.nan_if_infinite(x)
        points = self.linear(x if self.activation is None else self.activation(x))
        curvature = self.manifold_out.curvature
        wide = hyperboloid.lift(numerics.widen(hyperboloid.space(points)), curvature)
        average = averaging(edge_index, x.shape[0], wide.dtype, edge_weight)
        # Eq. 4 by two sums over j at each node: of w_ij h_j, and of w_ij.
        total = average(functional.pad(wide, (0, 1), value=1.0))
        space = midpoint_of_sum(total[:, :-1], total[:, -1:], curvature, torch.finfo(wide.dtype).eps)
        # From a curvature to the same one: it draws back what the dtype cannot hold, and computes the time.
        return change_curvature(numerics.narrow(space, points.dtype), self.manifold_out, self.manifold_out)

    def _weight(self) -> nn.Module:
        """What has a weight of the dtype that points must have."""
        if isinstance(self.linear, FullyLorentzLinear):
            return self.linear.direction
        return self.linear.linear if isinstance(self.linear, TangentLinear) else self.linear


def _check(x: Tensor, edges: Tensor | Graph, edge_weight: Tensor | None, ambient: int, layer: nn.Module | None) -> None:
    """Refuse arguments that do not fit together."""
    checks.last_axis("x", x, ambient, "in_features + 1", layer)
    check_graph(x, edges, edge_weight=edge_weight)
    if edge_weight is not None:
        checks.finite("edge_weight", edge_weight, 0.0)


def _average(messages: Tensor, weight: Tensor, target: Tensor, nodes: int) -> Tensor:
    """The mean of messages at each node by weight, zero where all weights are."""
    weight = weight.to(messages.dtype)
    total = weight.new_zeros(nodes).index_add(0, target, weight)
    return messages.new_zeros(nodes, messages.shape[-1]).index_add(
        0, target, messages * numerics.safe_div(weight, total[target])[:, None]
    )


def _softmax(
    logits: Float[Tensor, "entries heads"], weight: Float[Tensor, "entries 1"], target: Tensor, nodes: int
) -> Float[Tensor, "entries heads"]:
    """Shares ``w exp(logit)`` of the entries of each node, zero where all weights are."""
    lowest = torch.finfo(logits.dtype).min
    known = torch.where(weight > 0, logits, lowest).detach()
    place = target[:, None].expand_as(known)
    highest = known.new_full((nodes, known.shape[1]), lowest).scatter_reduce(0, place, known, "amax")
    raised = weight * (logits - highest[target]).clamp(max=0.0).exp()
    total = raised.new_zeros(nodes, raised.shape[1]).index_add(0, target, raised)
    return numerics.safe_div(raised, total[target])
