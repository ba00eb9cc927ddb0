"""What Hypformer is compared with on large graphs, at one width and with one search, and SGFormer's attention.

All are called as ``(x, edges)``, transformers with ``group=`` too: the processes or chunks that share the rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.models.baselines import MLP, EuclideanFormer
from holonomy._parts import Group, total
from holonomy.layers import GCN
from holonomy.models import Hypformer
from holonomy.numerics import safe_div
from holonomy.structures import Graph

TRANSFORMERS = ("hypformer", "flat", "sgformer")
OF_ROWS = ("mlp", "sgc", "sign")
MODELS = (*TRANSFORMERS, "gcn", *OF_ROWS)
HEADS = 2


class SimpleAttention(nn.Module):
    r"""SGFormer's linear attention (Wu et al., NeurIPS 2023, eqs. 5 and 6), its heads averaged.

    With :math:`\tilde Q = Q / |Q|_F` and :math:`\tilde K = K / |K|_F` over all N nodes,
    :math:`(V + \tilde Q (\tilde K^\top V) / N) / (1 + \tilde Q (\tilde K^\top 1) / N)`.
    """

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(features, heads * features) for _ in range(3))

    def forward(self, x: Tensor, group: Group | None = None) -> Tensor:
        """Map (n, d) to (n, d), of which there are more in the other parts of a group."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(0, 1) for f in (self.query, self.key, self.value))
        products = k.mT @ functional.pad(v, (0, 1), value=1.0)
        sums = torch.cat([products.flatten(), torch.stack([q.square().sum(), k.square().sum(), q.new_tensor(len(x))])])
        if group is not None:
            sums = total(sums, group)
        lengths = (sums[-3] * sums[-2]).sqrt()
        mixed = q @ safe_div(sums[:-3].view_as(products), lengths * sums[-1])
        return ((v + mixed[..., :-1]) / (1 + mixed[..., -1:])).mean(0)


class SGFormer(nn.Module):
    """SGFormer: a map, one layer of its attention, and a graph encoder beside it that is mixed in."""

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        *,
        layers: int = 1,
        heads: int = 1,
        graph_encoder: nn.Module | None = None,
        graph_weight: float = 0.5,
    ) -> None:
        super().__init__()
        self.entry, self.first_norm = nn.Linear(in_features, hidden), nn.LayerNorm(hidden)
        self.attentions = nn.ModuleList(SimpleAttention(hidden, heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.graph_encoder, self.graph_weight = graph_encoder, graph_weight
        self.decoder = nn.Linear(hidden, out_features)

    def forward(self, x: Tensor, edges: Tensor | Graph | None = None, group: Group | None = None) -> Tensor:
        """Classify the nodes."""
        h = torch.relu(self.first_norm(self.entry(x)))
        for attention, norm in zip(self.attentions, self.norms, strict=True):
            h = norm((h + attention(h, group)) / 2)
        if self.graph_encoder is not None:
            h = torch.lerp(h, self.graph_encoder(x, edges), self.graph_weight)
        return self.decoder(h)


def files_of(name: str, steps: int, *, graph: bool) -> list[int]:
    """How often the features that a model reads were propagated ahead."""
    own = {"mlp": [0], "sgc": [steps]}
    return [0] if graph else own.get(name, [*range(steps + 1)])


def build(name: str, in_features: int, hidden: int, out_features: int, layers: int, *, graph: bool) -> nn.Module:
    """A model by its name; with ``graph`` transformers have a GCN beside them."""
    if name in OF_ROWS:  # SGC is a linear map of propagated features, SIGN an MLP of all of them
        return MLP(in_features, 4 * hidden, out_features, layers=1 if name == "sgc" else 2)
    if name == "gcn":
        return GCN(in_features, hidden, out_features)
    encoder = GCN(in_features, hidden, hidden) if graph else None
    kind = {"hypformer": Hypformer, "flat": EuclideanFormer, "sgformer": SGFormer}[name]
    return kind(in_features, hidden, out_features, layers=layers, heads=HEADS, graph_encoder=encoder)


def parameters(model: nn.Module) -> int:
    """How many numbers are learned."""
    return sum(math.prod(p.shape) for p in model.parameters())
