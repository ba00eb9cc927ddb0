r"""Euclidean graph encoders: a GCN and weightless propagation, to run beside a hyperbolic transformer.

Both are called as ``(x, edge_index)``: node features ``(n, d)``, dense or sparse (CSR or COO), and ``(2, m)`` int64
with sources in the first row and targets in the second, both directions listed, as PyTorch Geometric holds graphs.
As in PyTorch Geometric's convolutions ``edge_weight`` comes third, and there is no ``batch``: edges stay within graphs.
Edges are sorted once for a tensor and the order is kept as long as it lives; a :class:`~holonomy.structures.Graph`
keeps it in the user's own hands.

They share :math:`\hat A = D^{-1/2} (A + I) D^{-1/2}`, D the degrees of :math:`A + I` (Kipf and Welling 2017).
Self-loops that ``edge_index`` already has are not counted twice; an edge that is listed twice weighs two. With an
``edge_weight`` ``(m,)`` A has these entries, D are their sums, and a self-loop that is listed keeps its weight in place
of one, as in PyTorch Geometric (listed twice, the sum of its weights; there the last); they get a gradient, for which
edges are gathered one by one. Weights may be negative: a node whose degree is then zero or less sends and receives
nothing (in PyTorch Geometric it becomes nan). Hyperbolic convolutions refuse negative weights, for which their averages
are not defined.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks
from holonomy._autograd import may_bypass
from holonomy._shapes import Float, Int
from holonomy.ops.csr import as_csr, is_sparse, multiply, sparse_dropout
from holonomy.ops.propagation import check_graph, propagation
from holonomy.structures import Graph


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

    With ``residual=True`` each layer adds its input to its result, through a linear map in the first layer and if the
    widths differ. Sparse features are multiplied sparsely and get no gradient.

    Args:
        in_features: features of a node.
        hidden_features: width of the layers in between.
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
        hidden_features: int,
        out_features: int,
        *,
        layers: int = 2,
        dropout: float = 0.0,
        residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(residual=residual)
        checks.floating_dtype(dtype)
        checks.positive_int("layers", layers)
        self.in_features = checks.positive_int("in_features", in_features)
        widths = [
            in_features,
            *[checks.positive_int("hidden_features", hidden_features)] * (layers - 1),
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
        """The result ``(n, out_features)`` at each node.

        ``x`` are node features ``(n, in_features)``, dense, CSR or COO; ``edge_index`` is ``(2, m)``, both directions
        listed, or a :class:`~holonomy.structures.Graph`; ``edge_weight`` ``(m,)``, beside an ``edge_index``, is ones if
        left out.
        """
        check_graph(x, edge_index, edge_weight=edge_weight)
        checks.last_axis("x", x, self.in_features, "in_features", self.convolutions[0], sparse=True)
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
        hidden_features: width of the MLP's one hidden layer.
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
        hidden_features: int,
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
        self.in_features = checks.positive_int("in_features", in_features)
        checks.positive_int("hidden_features", hidden_features)
        checks.positive_int("out_features", out_features)
        self.steps = checks.positive_int("steps", steps)
        self.teleport = checks.in_range("teleport", teleport, 0.0, 1.0)
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        self.first = nn.Linear(in_features, hidden_features, device=device, dtype=dtype)
        self.second = nn.Linear(hidden_features, out_features, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "nodes dim_in"],
        edge_index: Int[Tensor, "2 edges"] | Graph,
        edge_weight: Float[Tensor, " edges"] | None = None,
    ) -> Float[Tensor, "nodes dim_out"]:
        """Transform each node, then propagate.

        Arguments and result are those of :meth:`holonomy.layers.GCN.forward`.
        """
        check_graph(x, edge_index, edge_weight=edge_weight)
        checks.last_axis("x", x, self.in_features, "in_features", self.first, sparse=True)
        x = _dropped(x, self.dropout, training=self.training)
        inner = torch.relu(_product(x, self.first))
        start = self.second(functional.dropout(inner, self.dropout, self.training))
        propagate = propagation(edge_index, x.shape[0], x.dtype, edge_weight)
        result = start
        for _ in range(self.steps):
            result = torch.lerp(propagate(result), start, self.teleport)
        return result

    def extra_repr(self) -> str:
        """Steps and teleport, for ``repr``."""
        return f"steps={self.steps}, teleport={self.teleport}"
