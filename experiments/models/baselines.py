"""What Hypformer is compared with: an MLP, nearest neighbours, NodeFormer, and its own twin in Euclidean space.

The GCN is ``holonomy.layers.GCN``. Every network is called as ``(x, edge_index)`` with node
features (n, d), dense or sparse, and returns (n, classes).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.engine.options import RefusedError
from holonomy import checks
from holonomy._parts import Group
from holonomy.numerics import LAYER_NORM_EPS
from holonomy.ops.csr import is_sparse, multiply, sparse_dropout
from holonomy.ops.linear_attention.reference import linear_attention, power_features
from holonomy.ops.performer import performer_attention
from holonomy.ops.performer.features import orthogonal_projection
from holonomy.ops.propagation import propagation
from holonomy.structures import Graph


class MLP(nn.Module):
    """A multilayer perceptron that ignores the graph."""

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        *,
        layers: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = [in_features] + [hidden] * (layers - 1) + [out_features]
        self.maps = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Classify each node by its own features."""
        return self.maps[-1](self.embed(x))

    def embed(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return what the last linear map sees."""
        for linear in self.maps[:-1]:
            # x @ W^T multiplies sparsely where x is sparse; functional.linear would not take it.
            x = functional.dropout(torch.relu(x @ linear.weight.T + linear.bias), self.dropout, self.training)
        return x if x.layout == torch.strided else x.to_dense()


class LinearPropagation(nn.Module):
    """One linear map, then weightless propagation: APPNP (Gasteiger et al. 2019) without its hidden layer.

    Args:
        in_features: features of a node.
        out_features: width of the result.
        steps: number of propagations.
        teleport: how much of the start returns in each step, in [0, 1].
        dropout: share of the features dropped in training.
    """

    def __init__(
        self, in_features: int, out_features: int, *, steps: int, teleport: float = 0.1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.steps = checks.positive_int("steps", steps)
        self.teleport = checks.in_range("teleport", teleport, 0.0, 1.0)
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Map (n, in_features), dense or sparse CSR, to (n, out_features)."""
        if x.layout == torch.strided:
            x = functional.dropout(x, self.dropout, self.training)
        else:
            x = sparse_dropout(x, self.dropout, training=self.training)
        # The library's product: its way back is sparse, too.
        mapped = multiply(x, self.linear.weight.t()) if is_sparse(x) else x @ self.linear.weight.t()
        start = result = mapped + self.linear.bias
        propagate = propagation(edge_index, x.shape[0], start.dtype)
        for _ in range(self.steps):
            result = torch.lerp(propagate(result), start, self.teleport)
        return result


def nearest_neighbours(x: Tensor, y: Tensor, known: Tensor, asked: Tensor, *, k: int, classes: int) -> Tensor:
    """Count the classes among the ``k`` nearest known nodes.

    Args:
        x: node features (n, d), dense or sparse; the distance between two rows is Euclidean.
        y: classes (n,), read at the known nodes only.
        known: indices of the known nodes.
        asked: indices of the nodes to classify.
        k: number of neighbours; a node known twice counts once.
        classes: number of classes.

    Returns:
        Votes (len(asked), classes), plus less than one vote for the nearer neighbours, so that
        ``argmax`` breaks a tie in favour of the class that came nearest.

    Raises:
        ValueError: if there are fewer than ``k`` known nodes.
    """
    known = known.unique()
    if not 1 <= k <= len(known):
        raise RefusedError(f"k must lie between 1 and the {len(known)} known nodes, got {k}")
    x = x if x.layout == torch.strided else x.to_dense()
    # From differences, as in experiments/data/feature_graphs.py, which says why this is not scikit-learn's.
    distances = torch.cdist(x[asked], x[known], compute_mode="donot_use_mm_for_euclid_dist")
    place = distances.topk(k, dim=1, largest=False).indices
    votes = functional.one_hot(y[known][place], classes).to(x.dtype)
    nearness = torch.arange(k, 0, -1, dtype=x.dtype, device=x.device) / (k * (k + 1))
    return (votes * (1 + nearness)[:, None]).sum(dim=1)


class OnDense(nn.Module):
    """A model that reads dense features only, given them dense or sparse."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Classify the nodes."""
        return self.model(x if x.layout == torch.strided else x.to_dense(), edge_index)


class NodeFormerAttention(nn.Module):
    r"""Attention of all nodes to all by random features, and a learned weight for the edges (NodeFormer, NeurIPS 2022).

    .. math:: \sum_j \mathrm{softmax}_j(q_i \cdot k_j / \sqrt d)\, v_j + \sigma(b) \sum_j \hat A_{ij} v_j

    for each head, the softmax with positive random features in linear time. The paper's Gumbel noise and its loss on
    edges are left out.
    """

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        if features % heads:
            raise RefusedError(f"features must be a multiple of heads={heads}, got {features}")
        self.heads = heads
        self.query, self.key, self.value, self.result = (nn.Linear(features, features) for _ in range(4))
        self.edges = nn.Parameter(torch.zeros(heads))
        width = features // heads
        self.projection = nn.Buffer(orthogonal_projection(2 * width, width))

    def forward(self, x: Tensor, propagate: Callable[[Tensor], Tensor]) -> Tensor:
        """Map (n, d) to (n, d); ``propagate`` multiplies by the normalised adjacency matrix."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(0, 1) for f in (self.query, self.key, self.value))
        mixed = performer_attention(q, k, v, self.projection).transpose(0, 1)
        near = propagate(v.transpose(0, 1).flatten(1)).unflatten(-1, (self.heads, -1))
        return self.result((mixed + self.edges.sigmoid()[:, None] * near).flatten(1))


class NodeFormer(nn.Module):
    """A map, layers of ``NodeFormerAttention`` with residual and LayerNorm, and a linear classifier."""

    def __init__(
        self, in_features: int, hidden: int, out_features: int, *, layers: int = 2, heads: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.entry, self.decoder = nn.Linear(in_features, hidden), nn.Linear(hidden, out_features)
        self.attentions = nn.ModuleList(NodeFormerAttention(hidden, heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, eps=LAYER_NORM_EPS) for _ in range(layers + 1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Classify the nodes."""
        propagate = propagation(edge_index, x.shape[0], x.dtype)
        first, *norms = self.norms
        h = self.dropout(torch.relu(first(self.entry(x))))
        for attention, norm in zip(self.attentions, norms, strict=True):
            h = self.dropout(norm((h + attention(h, propagate)) / 2))
        return self.decoder(h)


class EuclideanAttention(nn.Module):
    """Hypformer's attention on Euclidean features: linear (eqs. 14-17, the same kernel) or softmax (eq. 2)."""

    def __init__(self, features: int, heads: int, *, attention: str = "linear", power: float = 2.0) -> None:
        super().__init__()
        if features % heads:
            raise RefusedError(f"features must be a multiple of heads={heads}, got {features}")
        self.heads, self.power = heads, power
        self.query, self.key, self.value = (nn.Linear(features, features) for _ in range(3))
        self.residual = nn.Linear(features, features) if attention == "linear" else None
        self.log_scale = nn.Parameter(torch.zeros(1)) if attention == "linear" else None

    def forward(self, x: Tensor, group: Group | None = None) -> Tensor:
        """Attend from all nodes to all nodes, (n, d) -> (n, d); with a group these are a part of all."""
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for linear in (self.query, self.key, self.value)
        )
        if self.residual is None or self.log_scale is None:
            if group is not None:
                raise RefusedError("attention must be linear where rows are a part of all, got softmax")
            mixed = functional.scaled_dot_product_attention(q, k, v)
            return mixed.transpose(-3, -2).flatten(-2)
        value = power_features(v, self.power) * torch.exp(-self.log_scale)
        # The length of a query cancels; without it the gradient of short ones does not overflow.
        query = power_features(q, self.power, unit=True)
        mixed = linear_attention(query, power_features(k, self.power), value, None, group)
        mixed, value = (part.transpose(-3, -2).flatten(-2) for part in (mixed, value))
        return mixed + self.residual(value)


class EuclideanBlock(nn.Module):
    """Position, attention, residual, LayerNorm, feed-forward, residual, LayerNorm.

    In flat space the Lorentzian midpoint of two points is their mean, hence the halves.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        feedforward: int,
        *,
        attention: str,
        power: float,
        dropout: float,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.position = nn.Linear(features, features)
        self.attention = EuclideanAttention(features, heads, attention=attention, power=power)
        self.first_norm = nn.LayerNorm(features, eps=LAYER_NORM_EPS)
        self.widen = nn.Linear(features, feedforward)
        self.narrow = nn.Linear(feedforward, features)
        self.second_norm = nn.LayerNorm(features, eps=LAYER_NORM_EPS)
        self.dropout, self.activation = nn.Dropout(dropout), activation

    def forward(self, x: Tensor, group: Group | None = None) -> Tensor:
        """Map (n, d) to (n, d)."""
        x = (x + self.position(x)) / 2
        x = self.first_norm((x + self.dropout(self.attention(x, group))) / 2)
        hidden = self.dropout(self.activation(self.widen(x)))
        return self.second_norm((x + self.dropout(self.narrow(hidden))) / 2)


class EuclideanFormer(nn.Module):
    """Hypformer with every curvature gone: the same sizes, the same graph branch, the same mixing.

    Args:
        in_features: features of a node.
        hidden_features: width of the blocks.
        out_features: number of classes.
        layers: number of blocks.
        heads: number of attention heads.
        feedforward: width of the feed-forward layers; four times the hidden width by default.
        attention: ``"linear"`` or ``"softmax"``.
        power: the sharpening p of eq. 19.
        dropout: share of entries dropped.
        activation: nonlinearity.
        transformer: whether the transformer branch takes part.
        graph_encoder: called as ``(x, edge_index)``, returns (n, hidden_features); or None.
        graph_weight: weight w of the graph branch in (1 - w) * transformer + w * graph.
        output_dropout: share of the transformer's output dropped before mixing.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        *,
        layers: int = 2,
        heads: int = 1,
        feedforward: int | None = None,
        attention: str = "linear",
        power: float = 2.0,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        transformer: bool = True,
        graph_encoder: nn.Module | None = None,
        graph_weight: float = 0.5,
        output_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not transformer and graph_encoder is None:
            raise RefusedError("a model needs the transformer, a graph encoder, or both")
        self.entry = nn.Linear(in_features, hidden_features) if transformer else None
        self.blocks = nn.ModuleList(
            EuclideanBlock(
                hidden_features,
                heads,
                feedforward or 4 * hidden_features,
                attention=attention,
                power=power,
                dropout=dropout,
                activation=activation,
            )
            for _ in range(layers if transformer else 0)
        )
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        self.output_dropout = nn.Dropout(output_dropout)
        self.graph_encoder, self.graph_weight = graph_encoder, graph_weight
        self.decoder = nn.Linear(hidden_features, out_features)

    def embed(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        batch: Tensor | None = None,
        group: Group | None = None,
    ) -> Tensor:
        """Return what the decoder sees, (n, hidden_features); nodes attend within their graph.

        The graphs of ``batch`` follow each other and have equally many nodes. With a group ``x`` are a part of the
        nodes of one graph.
        """
        graph = None if self.graph_encoder is None else self.graph_encoder(x, edge_index)
        if self.entry is None:
            return graph
        h = self.dropout(self.activation(x @ self.entry.weight.T + self.entry.bias))
        h = h.unflatten(0, (1 if batch is None else int(batch[-1]) + 1, -1))
        for block in self.blocks:
            h = block(h, group)
        h = self.output_dropout(h.flatten(0, 1))
        return h if graph is None else (1 - self.graph_weight) * h + self.graph_weight * graph

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        batch: Tensor | None = None,
        group: Group | None = None,
    ) -> Tensor:
        """Classify the nodes."""
        return self.decoder(self.embed(x, edge_index, batch, group))
