"""What the graph transformers are compared with: GCN, GIN, SAGE, GAT and GPS with edge features, an MLP without edges.

All are called as ``(x, edge_index, batch, edge_attr=edge_attr)``, like the models of ``holonomy.models``, and return a
row for each node or each graph. They share everything but the layer: an entry map, layers with batch norm, ReLU and
residual, a readout, an MLP at the end.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.engine.options import RefusedError
from holonomy.ops.propagation import normalised_edges
from holonomy.structures.padded import PaddedGraphs

Kind = Literal["gcn", "gin", "sage", "gat", "gps", "mlp"]


class GCNLayer(nn.Module):
    """Normalised sum of messages ReLU(W x_j + E e_ij) (Kipf and Welling 2017; edges as in OGB's baseline)."""

    def __init__(self, features: int, edge_features: int) -> None:
        super().__init__()
        self.node = nn.Linear(features, features)
        self.edge = nn.Linear(edge_features, features, bias=False) if edge_features else None

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor:
        h = self.node(x)
        source, target, weight = normalised_edges(edge_index, x.shape[0], x.dtype)
        if self.edge is None or edge_attr is None:
            message = h[source]
        else:
            loops = edge_attr.new_zeros(x.shape[0], edge_attr.shape[1])
            message = torch.relu(h[source] + self.edge(torch.cat([edge_attr, loops])))
        return torch.zeros_like(h).index_add(0, target, message * weight[:, None])


class GINLayer(nn.Module):
    """MLP((1 + eps) x_i + sum of ReLU(x_j + E e_ij)) (Xu et al. 2019; edges as Hu et al. 2020)."""

    def __init__(self, features: int, edge_features: int) -> None:
        super().__init__()
        self.edge = nn.Linear(edge_features, features) if edge_features else None
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(
            nn.Linear(features, 2 * features),
            nn.BatchNorm1d(2 * features),
            nn.ReLU(),
            nn.Linear(2 * features, features),
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor:
        source, target = edge_index
        message = x[source]
        if self.edge is not None and edge_attr is not None:
            message = torch.relu(message + self.edge(edge_attr))
        return self.mlp((1 + self.eps) * x + torch.zeros_like(x).index_add(0, target, message))


class SAGELayer(nn.Module):
    """W x_i + V mean of ReLU(x_j + E e_ij) (Hamilton et al. 2017); without edge features the mean of x_j."""

    def __init__(self, features: int, edge_features: int) -> None:
        super().__init__()
        self.edge = nn.Linear(edge_features, features) if edge_features else None
        self.own = nn.Linear(features, features)
        self.near = nn.Linear(features, features, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor:
        source, target = edge_index
        message = x[source]
        if self.edge is not None and edge_attr is not None:
            message = torch.relu(message + self.edge(edge_attr))
        count = x.new_zeros(len(x), 1).index_add(0, target, x.new_ones(len(target), 1))
        return self.own(x) + self.near(torch.zeros_like(x).index_add(0, target, message) / count.clamp(min=1))


class GATLayer(nn.Module):
    """Attention over neighbours and the node itself (Velickovic et al. 2018), edge features in logit and value."""

    def __init__(self, features: int, edge_features: int, heads: int) -> None:
        super().__init__()
        if features % heads:
            raise RefusedError(f"features must be a multiple of heads={heads}, got {features}")
        self.heads = heads
        self.node = nn.Linear(features, features)
        self.edge = nn.Linear(edge_features, features, bias=False) if edge_features else None
        # What the logit reads of the target, the source, and the edge where it has features.
        self.reads = nn.ParameterList(
            nn.Parameter(torch.randn(heads, features // heads) / 4) for _ in range(3 if edge_features else 2)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor:
        h = self.node(x)
        loops = torch.arange(x.shape[0], device=x.device)
        source, target = torch.cat([edge_index, loops.expand(2, -1)], dim=1)
        split = h.unflatten(1, (self.heads, -1))
        values = split[source]
        logit = (split * self.reads[0]).sum(-1)[target] + (split * self.reads[1]).sum(-1)[source]
        if self.edge is not None and edge_attr is not None:
            e = self.edge(torch.cat([edge_attr, edge_attr.new_zeros(len(loops), edge_attr.shape[1])]))
            e = e.unflatten(1, (self.heads, -1))
            values, logit = values + e, logit + (e * self.reads[2]).sum(-1)
        weight = neighbour_softmax(functional.leaky_relu(logit, 0.2), target, x.shape[0])
        return torch.zeros_like(split).index_add(0, target, values * weight[..., None]).flatten(1)


def neighbour_softmax(logit: Tensor, target: Tensor, nodes: int) -> Tensor:
    """Softmax of (m, heads) over the edges of each target; each target's own maximum is taken off."""
    highest = logit.detach().new_full((nodes, logit.shape[1]), -torch.inf)
    highest = highest.scatter_reduce(0, target[:, None].expand_as(logit), logit.detach(), "amax")
    share = torch.exp(logit - highest[target])
    return share / torch.zeros_like(highest).index_add(0, target, share)[target]


class SelfLayer(nn.Module):
    """A linear map of each node by itself: the MLP among the layers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.node = nn.Linear(features, features)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor:  # noqa: ARG002
        return self.node(x)


class GPSLayer(nn.Module):
    """A GIN layer and softmax attention over the nodes of a graph, side by side (Rampasek et al. 2022, eqs. 2 to 5).

    Each has its residual and batch norm, the sum goes through an MLP.
    """

    def __init__(self, features: int, edge_features: int, heads: int, feedforward: int) -> None:
        super().__init__()
        self.near = GINLayer(features, edge_features)
        self.all = nn.MultiheadAttention(features, heads, batch_first=True)
        self.norms = nn.ModuleList(nn.BatchNorm1d(features) for _ in range(2))
        self.mlp = mlp(features, feedforward, features)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None, batch: Tensor | None) -> Tensor:
        whole = PaddedGraphs.of(x, x.new_zeros(len(x), dtype=torch.int64) if batch is None else batch)
        attended, _ = self.all(*[whole.values] * 3, key_padding_mask=whole.padding, need_weights=False)
        parts = (self.near(x, edge_index, edge_attr), whole.rows(attended))
        return self.mlp(sum(norm(x + part) for norm, part in zip(self.norms, parts, strict=True)))


class MessagePassing(nn.Module):
    """Layers of one kind, then a value for each node or each graph.

    Args:
        kind: which layer.
        in_features: features of a node.
        hidden: width.
        out_features: width of the result.
        layers: number of layers.
        edge_features: features of an edge, 0 for none.
        level: ``"node"`` or ``"graph"``.
        heads: attention heads of GAT and GPS.
        feedforward: width between the last two linear maps of a layer of GPS, twice ``hidden`` if left out.
        dropout: share of entries dropped after each layer.
    """

    def __init__(
        self,
        kind: Kind,
        in_features: int,
        hidden: int,
        out_features: int,
        *,
        layers: int = 4,
        edge_features: int = 0,
        level: Literal["node", "graph"] = "graph",
        heads: int = 4,
        feedforward: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.level, self.dropout = level, dropout
        self.entry = nn.Linear(in_features, hidden)
        wide = 2 * hidden if feedforward is None else feedforward
        self.layers = nn.ModuleList(_layer(kind, hidden, edge_features, heads, wide) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in range(layers))
        # A graph is read out by the sum and the mean of its nodes: properties that grow with it, and that do not.
        width = 2 * hidden if level == "graph" else hidden
        self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out_features))

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None, *, edge_attr: Tensor | None = None
    ) -> Tensor:
        """Return (n, out_features) for nodes, (graphs, out_features) for graphs."""
        h = functional.dropout(self.entry(x), self.dropout, self.training)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            graphs = (batch,) if isinstance(layer, GPSLayer) else ()
            mixed = torch.relu(norm(layer(h, edge_index, edge_attr, *graphs)))
            h = h + functional.dropout(mixed, self.dropout, self.training)
        return self.head(h if self.level == "node" else readout(h, batch))


def _layer(kind: Kind, features: int, edge_features: int, heads: int, feedforward: int) -> nn.Module:
    match kind:
        case "gcn":
            return GCNLayer(features, edge_features)
        case "gin":
            return GINLayer(features, edge_features)
        case "sage":
            return SAGELayer(features, edge_features)
        case "gat":
            return GATLayer(features, edge_features, heads)
        case "gps":
            return GPSLayer(features, edge_features, heads, feedforward)
        case "mlp":
            return SelfLayer(features)


def readout(x: Tensor, batch: Tensor | None) -> Tensor:
    """Return sum / 10 and mean of the nodes of each graph, (graphs, 2 d); the tenth keeps both of one size.

    A graph without nodes has zeros; without ``batch`` there is one graph.
    """
    if batch is None:
        total, count = x.sum(dim=0, keepdim=True), x.new_tensor([len(x)])
    else:
        count = torch.bincount(batch)
        total = x.new_zeros(len(count), x.shape[1]).index_add(0, batch, x)
    return torch.cat([total / 10, total / count[:, None].clamp(min=1)], dim=1)


def mlp(*sizes: int) -> nn.Sequential:
    """Linear maps of these sizes with ReLU between."""
    maps: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        maps += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*maps[:-1])
