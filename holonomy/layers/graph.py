r"""Euclidean graph encoders: a GCN and weightless propagation, to run beside a hyperbolic transformer.

Both are called as ``(x, edge_index)``: node features ``(n, d)``, dense or sparse (CSR or COO), and ``(2, m)`` int64
with sources in the first row and targets in the second, both directions listed, as PyTorch Geometric holds graphs.
Edges are sorted once for a tensor and the order is kept as long as it lives; a :class:`~holonomy.structures.Graph`
keeps it in the user's own hands.

They share :math:`\hat A = D^{-1/2} (A + I) D^{-1/2}`, D the degrees of :math:`A + I` (Kipf and Welling 2017).
Self-loops that ``edge_index`` already has are not counted twice; an edge that is listed twice weighs two. With an
``edge_weight`` ``(m,)`` A has these entries, D are their sums, and a self-loop that is listed keeps its weight in place
of one, as in PyTorch Geometric; they get a gradient, for which edges are gathered one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from holonomy import _autograd, checks
from holonomy._autograd import may_bypass
from holonomy.ops.csr import as_csr, csr, is_sparse, multiply, sparse_dropout
from holonomy.structures import Graph

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["GCN", "Propagation", "check_graph", "edge_list", "normalised_edges", "propagation"]


def normalised_edges(
    edge_index: Int[Tensor, "2 edges"],
    nodes: int,
    dtype: torch.dtype,
    edge_weight: Float[Tensor, " edges"] | None = None,
) -> tuple[Int[Tensor, " entries"], Int[Tensor, " entries"], Float[Tensor, " entries"]]:
    """The entries of :math:`D^{-1/2} (A + I) D^{-1/2}`, unsorted, those of I last."""
    loops = torch.arange(nodes, device=edge_index.device)
    source, target = torch.cat([edge_index, loops.expand(2, nodes)], dim=1)
    own = edge_index[0] == edge_index[1]
    at_loops = torch.ones_like(loops, dtype=_wide(dtype))  # bfloat16 counts to 256
    if edge_weight is None:
        at_edges = (~own).to(at_loops.dtype)
    else:
        edge_weight = edge_weight.to(at_loops.dtype)
        listed = torch.zeros_like(at_loops).index_add(0, edge_index[0], own.to(at_loops.dtype)) > 0
        kept = torch.zeros_like(at_loops).index_add(0, edge_index[0], edge_weight * own)
        at_loops, at_edges = torch.where(listed, kept, at_loops), edge_weight * ~own
    weight = torch.cat([at_edges, at_loops])
    degree = weight.new_zeros(nodes).index_add(0, target, weight)
    # Without weights every node has its loop; with them a degree may be zero or less, and such a node keeps nothing.
    scale = torch.where(degree > 0, degree, 1.0).rsqrt() * (degree > 0)
    return source, target, (weight * scale[source] * scale[target]).to(dtype)


def propagation(
    edge_index: Int[Tensor, "2 edges"] | Graph,
    nodes: int,
    dtype: torch.dtype,
    edge_weight: Float[Tensor, " edges"] | None = None,
) -> Callable[[Tensor], Tensor]:
    r"""The map :math:`x \mapsto \hat A x` of a graph, differentiable in x and in the weights.

    A sum over a node's neighbours has one order, so that CPU results repeat bit for bit. Under ``torch.compile`` and
    ``torch.func``, which transforms no CSR tensor, on the meta device and with weights, it is gather and ``index_add``.
    """
    if (
        edge_weight is not None
        or torch.compiler.is_compiling()
        or _autograd.transformed()
        or getattr(edge_index, "is_meta", False)
    ):
        source, target, weight = normalised_edges(edge_list(edge_index), nodes, dtype, edge_weight)
        return partial(_gather, source=source, target=target, weight=weight)
    graph = edge_index if isinstance(edge_index, Graph) else _sorted_once(edge_index, nodes)
    incoming, outgoing = (
        csr(*neighbours, weight, (nodes, nodes)) for neighbours, weight in graph.normalised(_wide(dtype))
    )
    return partial(_propagate, forward=incoming, backward=outgoing)


def edge_list(edges: Int[Tensor, "2 edges"] | Graph) -> Int[Tensor, "2 edges"]:
    """The edges of a graph as ``edge_index``."""
    return edges.edge_index if isinstance(edges, Graph) else edges


# Of each tensor of edges, its state and the graph that was made of it, for as long as the tensor lives.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _sorted_once(edge_index: Tensor, nodes: int) -> Graph:
    """The graph of a list of edges, made anew where torch has changed the list in place."""
    if edge_index.is_inference():  # whose changes are not counted
        return Graph(edge_index, nodes)
    state = (edge_index.data_ptr(), edge_index._version, edge_index.shape, nodes)
    if edge_index not in _known or _known[edge_index][0] != state:
        with torch.inference_mode(mode=False):
            _known[edge_index] = state, Graph(edge_index, nodes)
    return _known[edge_index][1]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _gather(x: Tensor, *, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    messages = x.index_select(0, source).to(_wide(weight.dtype)) * weight[:, None]
    return messages.new_zeros(x.shape).index_add(0, target, messages).to(x.dtype)


def _propagate(x: Tensor, *, forward: Tensor, backward: Tensor) -> Tensor:
    return multiply(forward, x, lambda: backward).to(x.dtype)


def check_graph(
    x: Tensor, edges: Tensor | Graph, batch: Tensor | None = None, edge_weight: Tensor | None = None
) -> None:
    """Refuse node features, edges, their weights and the graphs of nodes that do not fit together."""
    if edge_weight is not None:
        if isinstance(edges, Graph):
            raise ValueError(
                "edge_weight must be None beside a Graph, which has sorted its edges; pass the edge_index."
            )
        checks.floating("edge_weight", edge_weight)
        checks.shaped("edge_weight", edge_weight, edges.shape[1:], "(edges,) = ")
        checks.on_device(x.device, edge_weight=edge_weight)
    if not isinstance(edges, Graph) or batch is not None:
        checks.graph(x, edge_list(edges), batch=batch)
    if not isinstance(edges, Graph):
        return
    if x.device != edges.device:
        raise ValueError(f"edge_index must be on the device of x ({x.device}), got {edges.device}.")
    if x.shape[:1] != (edges.num_nodes,):
        raise ValueError(f"x must have one row for each node of edge_index ({edges.num_nodes}), got {tuple(x.shape)}.")


def _product(x: Tensor, linear: nn.Linear) -> Tensor:
    if not is_sparse(x):
        return linear(x)
    if not may_bypass(linear, nn.Linear):
        return linear(x.to_dense())
    product = multiply(x, linear.weight.t())
    return product if linear.bias is None else product + linear.bias  # pyright: ignore[reportUnnecessaryComparison]


def _dropped(x: Tensor, p: float, *, training: bool) -> Tensor:
    if is_sparse(x):
        return sparse_dropout(as_csr(x), p, training=training)
    return functional.dropout(x, p, training)


class GCN(nn.Module):
    r"""Graph convolutional network (Kipf and Welling 2017): :math:`\hat A\, \mathrm{dropout}(H)\, W + b`, ReLU between.

    With ``residual=True`` each layer adds its input to its result, as it is where the widths agree, through a
    linear map of its own in the first layer and where they differ. Sparse features are multiplied sparsely and
    get no gradient.

    Args:
        in_features: features of a node.
        hidden: width of the layers in between.
        out_features: width of the result.
        layers: number of convolutions.
        dropout: probability that an input entry of a convolution is dropped in training.
        residual: add the input of each layer to its result.
        device: of the parameters.
        dtype: of the parameters.

    >>> edges = torch.tensor([[0, 1], [1, 0]])
    >>> GCN(4, 8, 3)(torch.randn(2, 4), edges).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        *,
        layers: int = 2,
        dropout: float = 0.0,
        residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        checks.positive_int("layers", layers)
        widths = [
            checks.positive_int("in_features", in_features),
            *[checks.positive_int("hidden", hidden)] * (layers - 1),
            checks.positive_int("out_features", out_features),
        ]
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        self.residual = residual
        pairs = list(pairwise(widths))
        self.convolutions = nn.ModuleList(nn.Linear(a, b, bias=False, device=device, dtype=dtype) for a, b in pairs)
        self.biases = nn.ParameterList(torch.zeros(b, device=device, dtype=dtype) for _, b in pairs)
        self.skips = nn.ModuleList(
            nn.Identity() if a == b and i > 0 else nn.Linear(a, b, bias=False, device=device, dtype=dtype)
            for i, (a, b) in enumerate(pairs)
            if residual
        )

    def reset_parameters(self) -> None:
        """Draw the weights anew; the biases are zero."""
        for linear in (*self.convolutions, *self.skips):
            if isinstance(linear, nn.Linear):
                linear.reset_parameters()
        for bias in self.biases:
            nn.init.zeros_(bias)

    def forward(
        self,
        x: Float[Tensor, "nodes dim_in"],
        edge_index: Int[Tensor, "2 edges"] | Graph,
        edge_weight: Float[Tensor, " edges"] | None = None,
    ) -> Float[Tensor, "nodes dim_out"]:
        """Convolve.

        Args:
            x: node features ``(n, in_features)``, dense, CSR or COO.
            edge_index: ``(2, m)``, both directions listed, or a :class:`~holonomy.structures.Graph`.
            edge_weight: ``(m,)``, beside an ``edge_index``; ones if left out.

        Returns:
            ``(n, out_features)``.
        """
        check_graph(x, edge_index, edge_weight=edge_weight)
        first = cast("nn.Linear", self.convolutions[0])
        checks.last_axis("x", x, first.in_features, "in_features", first, sparse=True)
        propagate = propagation(edge_index, x.shape[0], x.dtype, edge_weight)
        last = len(self.convolutions) - 1
        for i, (convolution, bias) in enumerate(zip(self.convolutions, self.biases, strict=True)):
            x = _dropped(x, self.dropout, training=self.training)
            convolved = propagate(_product(x, cast("nn.Linear", convolution))) + bias
            if self.residual:
                skip = self.skips[i]
                kept = x if isinstance(skip, nn.Identity) else _product(x, cast("nn.Linear", skip))
                convolved = convolved + kept
            x = convolved if i == last else torch.relu(convolved)
        return x


class Propagation(nn.Module):
    r"""An MLP, then weightless propagation with teleport: APPNP (Gasteiger et al. 2019).

    .. math:: Z^{(0)} = H = \mathrm{MLP}(x), \qquad Z^{(k+1)} = (1 - \alpha)\, \hat A Z^{(k)} + \alpha H .

    Args:
        in_features: features of a node.
        hidden: width of the MLP's one hidden layer.
        out_features: width of the result.
        steps: number of propagations.
        teleport: :math:`\alpha`, in [0, 1]: how much of H returns in each step.
        dropout: probability that an entry entering either layer of the MLP is dropped in training.
        device: of the parameters.
        dtype: of the parameters.

    >>> edges = torch.tensor([[0, 1], [1, 0]])
    >>> Propagation(4, 8, 3)(torch.randn(2, 4).to_sparse(), edges).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        *,
        steps: int = 8,
        teleport: float = 0.1,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        checks.positive_int("in_features", in_features)
        checks.positive_int("hidden", hidden)
        checks.positive_int("out_features", out_features)
        self.steps = checks.positive_int("steps", steps)
        self.teleport = checks.in_range("teleport", teleport, 0.0, 1.0)
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        self.first = nn.Linear(in_features, hidden, device=device, dtype=dtype)
        self.second = nn.Linear(hidden, out_features, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "nodes dim_in"],
        edge_index: Int[Tensor, "2 edges"] | Graph,
        edge_weight: Float[Tensor, " edges"] | None = None,
    ) -> Float[Tensor, "nodes dim_out"]:
        """Transform each node, then propagate.

        Args:
            x: node features ``(n, in_features)``, dense, CSR or COO.
            edge_index: ``(2, m)``, both directions listed, or a :class:`~holonomy.structures.Graph`.
            edge_weight: ``(m,)``, beside an ``edge_index``; ones if left out.

        Returns:
            ``(n, out_features)``.
        """
        check_graph(x, edge_index, edge_weight=edge_weight)
        checks.last_axis("x", x, self.first.in_features, "in_features", self.first, sparse=True)
        x = _dropped(x, self.dropout, training=self.training)
        hidden = torch.relu(_product(x, self.first))
        start = self.second(functional.dropout(hidden, self.dropout, self.training))
        propagate = propagation(edge_index, x.shape[0], x.dtype, edge_weight)
        result = start
        for _ in range(self.steps):
            result = torch.lerp(propagate(result), start, self.teleport)
        return result

    def extra_repr(self) -> str:
        """Steps and teleport, for ``repr``.

        Returns:
            The line that ``repr`` shows.
        """
        return f"steps={self.steps}, teleport={self.teleport}"
