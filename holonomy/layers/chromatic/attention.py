r"""Chromatic self-attention, in which a pair of nodes has a filter of channels in place of a number (CSA section 3.2).

Axes: nodes ``(graphs, n, features)``, pairs ``(graphs, i, j, features)`` where node i attends and j is looked at. A
mask is ``(graphs, n)``, ``True`` at nodes; what padding holds has no effect, and the result is zero there. Keys have
no bias, nor have the maps of edges to biases: softmax does not see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks
from holonomy._autograd import may_bypass
from holonomy._shapes import Bool, Float
from holonomy.ops.chromatic_attention import chromatic_attention, chromatic_filters
from holonomy.ops.heads import head_count
from holonomy.structures import joint

Mode = Literal["chromatic", "mono", "additive"]
"""One bias a channel (CSA eq. 5), one a head (CSA eq. 4), or queries, keys and edges summed (below CSA eq. 7)."""

DropoutOver = Literal["edges", "nodes", "channels"]
"""What of the filters is dropped together: pairs, nodes j, channels of a graph (CSA section 3.5)."""


class ProjectedEdges(NamedTuple):
    r"""What attention needs of the edges: :math:`E^{\mathrm{att}}` and :math:`E^{\mathrm{val}}` of CSA figure 1."""

    bias: Tensor  # (graphs, n, n, features), or heads channels where the mode is "mono"
    value: Tensor | None  # (graphs, n, n, features), or None


class EdgeProjection(nn.Module):
    r"""Linear maps of edge features to biases and values: :math:`W_E E^{(0)}, W_{EV} E^{(0)}`, CSA eqs. 4, 5 and 7.

    Each attention layer has its own by default. To share one between layers (CSA appendix A, edge parameter sharing),
    apply it once and pass the result to all of them.

    Args:
        edge_features: of :math:`E^{(0)}`.
        features: d.
        heads: number of heads.
        mode: of the attention.
        edge_values: whether there is a :math:`W_{EV}`.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: if a size or choice is not allowed.

    >>> EdgeProjection(3, 8, 2, mode="mono")(torch.randn(1, 5, 5, 3)).bias.shape
    torch.Size([1, 5, 5, 2])
    """

    value: nn.Linear | None

    def __init__(
        self,
        edge_features: int,
        features: int,
        heads: int,
        *,
        mode: Mode = "chromatic",
        edge_values: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(edge_values=edge_values)
        checks.floating_dtype(dtype)
        checks.one_of("mode", mode, ("chromatic", "mono", "additive"))
        self.edge_features = checks.positive_int("edge_features", edge_features)
        checks.positive_int("features", features)
        checks.positive_int("heads", heads)
        biases = heads if mode == "mono" else features
        self.bias = nn.Linear(edge_features, biases, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(edge_features, features, bias=False, device=device, dtype=dtype) if edge_values else None

    def forward(self, edges: Float[Tensor, "graphs nodes nodes edge_features"]) -> ProjectedEdges:
        """Biases and values of edges ``(graphs, n, n, edge_features)``."""
        checks.last_axis("edges", edges, self.edge_features, "edge_features", self.bias)
        return ProjectedEdges(self.bias(edges), None if self.value is None else self.value(edges))

    def weights(
        self,
    ) -> tuple[Float[Tensor, "biases edge_features"], Float[Tensor, "values edge_features"] | None] | None:
        """The matrices of both maps, for callers that multiply by them instead of calling this module.

        None where calling would do something else: with another module in the place of a map, an adapter beside it or a
        quantized one, or with a hook.
        """
        maps = [module for module in (self.bias, self.value) if module is not None]
        multiply = all(may_bypass(module, nn.Linear) and getattr(module, "bias", None) is None for module in maps)
        if not (multiply and may_bypass(self, EdgeProjection)):
            return None
        return self.bias.weight, None if self.value is None else self.value.weight


class ChromaticAttention(nn.Module):
    r"""Multi-head self-attention of the nodes of graphs that sees the relation of each pair, CSA eqs. 4 to 7.

    .. math:: \Bigl( \sum_j \tilde a(i, j) \odot (V_j + W_{EV} E_{ij}) \Bigr) W_O

    ================  ===============================================================================================
    ``mode``          :math:`a(i, j)`, normalised over j in each channel
    ================  ===============================================================================================
    ``"chromatic"``   :math:`\exp(Q_i^h \cdot K_j^h / \sqrt{d_h} + (W_E E_{ij})_c)`, a bias a channel, CSA eq. 5
    ``"mono"``        :math:`\exp(Q_i^h \cdot K_j^h / \sqrt{d_h} + (W_E E_{ij})_h)`, a bias a head, CSA eq. 4:
                      Graphormer where E is the one-hot shortest path, GraphiT where it is the log of a kernel
    ``"additive"``    :math:`\exp \sigma(Q_i + K_j + W_E E_{ij})` in each channel; there are no heads, and their
                      number has no effect
    ================  ===============================================================================================

    As printed (CSA section 3.2) the additive form has no :math:`\sigma`. Then :math:`\exp Q_i` is a common factor of
    all j, which the normalisation cancels: the result would not depend on :math:`W_Q`. Hence the activation; SiLU, the
    default, is not monotone, so that the order of the keys may depend on the query.

    Dropout is applied to the filters (CSA section 3.5): to pairs (``"edges"``), to nodes j for all i and channels
    (``"nodes"``), or to channels for all pairs of a graph (``"channels"``). What stays is divided by 1 - p.

    Args:
        features: d, of input and output.
        heads: number of heads, a divisor of d.
        edge_features: of a pair; 0 for none, which is plain self-attention; None where the edges come projected, from
            an :class:`EdgeProjection` of the same mode that layers share.
        mode: see above.
        edge_values: whether edges join the messages (CSA eq. 7) or weigh them only (CSA eq. 6).
        activation: :math:`\sigma` of the additive form: elementwise, without parameters.
        dropout: probability.
        dropout_over: see above.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer, or the activation no function.
        ValueError: if a size, probability or choice is not allowed, or an activation has no effect.

    >>> attention = ChromaticAttention(8, 2, 3)
    >>> attention(torch.randn(4, 5, 8), torch.randn(4, 5, 5, 3)).shape
    torch.Size([4, 5, 8])
    """

    edges: EdgeProjection | None

    def __init__(
        self,
        features: int,
        heads: int,
        edge_features: int | None,
        *,
        mode: Mode = "chromatic",
        edge_values: bool = True,
        activation: Callable[[Tensor], Tensor] = functional.silu,
        dropout: float = 0.0,
        dropout_over: DropoutOver = "edges",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(edge_values=edge_values)
        checks.floating_dtype(dtype)
        self.heads = head_count(features, heads)
        self.features = features
        self.mode = checks.one_of("mode", mode, ("chromatic", "mono", "additive"))
        checks.function("activation", activation)
        if mode != "additive" and activation is not functional.silu:
            raise ValueError(f"activation must be left out with mode {mode!r}, where it has no effect.")
        self.activation = activation if mode == "additive" else None
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        self.dropout_over = checks.one_of("dropout_over", dropout_over, ("edges", "nodes", "channels"))
        if edge_features is not None:
            checks.nonnegative_int("edge_features", edge_features)
        self.edge_features, self.edge_values = edge_features, edge_values
        self.query = nn.Linear(features, features, device=device, dtype=dtype)
        self.key = nn.Linear(features, features, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(features, features, bias=False, device=device, dtype=dtype)
        self.edges = None
        if edge_features:
            self.edges = EdgeProjection(
                edge_features, features, heads, mode=mode, edge_values=edge_values, device=device, dtype=dtype
            )
        self.out = nn.Linear(features, features, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "graphs nodes features"],
        edges: Float[Tensor, "graphs nodes nodes edge_features"] | ProjectedEdges | None = None,
        mask: Bool[Tensor, "graphs nodes"] | None = None,
    ) -> Float[Tensor, "graphs nodes features"]:
        """Attend.

        Args:
            x: ``(graphs, n, features)``.
            edges: ``(graphs, n, n, edge_features)``, or what an :class:`EdgeProjection` makes of them.
            mask: ``(graphs, n)``, ``True`` at nodes.

        Returns:
            ``(graphs, n, features)``, zero at padding.

        Raises:
            TypeError: if the mask is not boolean.
            ValueError: if a shape does not fit.
        """
        x, bias, value = self._checked(x, edges, mask)
        # W_E and W_EV go down with the edges, which are then projected a chunk of pairs at a time. Where something else
        # stands in their place, all pairs are projected here, without what padding holds.
        maps = None if self.edges is None else self.edges.weights()
        if self.edges is not None and bias is not None and maps is None:
            bias, value = self.edges(bias if mask is None else bias.masked_fill(~joint(mask, 2)[..., None], 0.0))
        bias_map, value_map = maps or (None, None)
        drop = self.dropout if self.training else 0.0
        # CSA section 3.5: of the filters, pairs (i, j) are dropped, or nodes j for every i.
        keep = None
        if drop > 0.0 and self.dropout_over != "channels":
            over = (x.shape[0], x.shape[1] if self.dropout_over == "edges" else 1, x.shape[1])
            keep = functional.dropout(x.new_ones(over), drop)
        how: dict[str, Any] = {"heads": self.heads, "activation": self.activation, "keep": keep}
        projected = self.query(x), self.key(x), self.value(x)
        attended = chromatic_attention(*projected, bias, value, mask, bias_map=bias_map, value_map=value_map, **how)
        if drop > 0.0 and self.dropout_over == "channels":
            # A channel that is dropped from every filter of a graph is one that is dropped from the result.
            attended = attended * functional.dropout(attended.new_ones(x.shape[0], 1, x.shape[2]), drop)
        out = self.out(attended)
        return out if mask is None else out.masked_fill(~mask[..., None], 0.0)

    def filters(
        self,
        x: Float[Tensor, "graphs nodes features"],
        edges: Float[Tensor, "graphs nodes nodes edge_features"] | ProjectedEdges | None = None,
        mask: Bool[Tensor, "graphs nodes"] | None = None,
    ) -> Float[Tensor, "graphs nodes nodes features"]:
        r"""The filters :math:`\tilde a(i, j)`, as CSA figure 3 draws them, without dropout.

        Arguments are those of :meth:`forward`. Of ``(graphs, n, n, features)`` each channel is a distribution over
        j, zero where i or j is padding.
        """
        x, bias, _ = self._checked(x, edges, mask)
        # Filters need the bias of every pair, values of none.
        if self.edges is not None and bias is not None:
            bias = self.edges(bias if mask is None else bias.masked_fill(~joint(mask, 2)[..., None], 0.0)).bias
        return chromatic_filters(self.query(x), self.key(x), bias, mask, heads=self.heads, activation=self.activation)

    def _checked(
        self, x: Tensor, edges: Tensor | ProjectedEdges | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The nodes with zeros at padding, and what biases and values are made of."""
        checks.last_axis("x", x, self.features, "features", self.query)
        if x.ndim != 3:
            raise ValueError(f"x must have shape (graphs, n, features), got {tuple(x.shape)}.")
        if mask is not None:
            checks.node_mask(mask, x.shape[:-1])
            x = x.masked_fill(~mask[..., None], 0.0)
        if isinstance(edges, ProjectedEdges):
            if self.edge_features is not None:
                raise ValueError(f"edges must be a tensor where edge_features is given, here {self.edge_features}.")
            if (edges.value is not None) != self.edge_values:
                raise ValueError("edges must be projected with values exactly if edge_values is True.")
            channels = self.heads if self.mode == "mono" else self.features
            for part, width in ((edges.bias, channels), (edges.value, self.features)):
                if part is not None:
                    checks.shaped("edges", part, (*x.shape[:2], x.shape[1], width), "(graphs, n, n, channels) = ")
                    checks.last_axis("edges", part, width, "channels", self.query)
            return x, edges.bias, edges.value
        if self.edge_features is None:
            raise ValueError("edges must be projected by an EdgeProjection where edge_features is None.")
        if (edges is None) != (self.edge_features == 0):
            raise ValueError(
                f"edges must be given exactly if edge_features is not 0, which is {self.edge_features} here."
            )
        if edges is None:
            return x, None, None
        checks.floating("edges", edges)
        pairs = (*x.shape[:2], x.shape[1], self.edge_features)
        checks.shaped("edges", edges, pairs, "(graphs, n, n, edge_features) = ")
        checks.last_axis("edges", edges, edges.shape[-1], "edge_features", self.query)
        return x, edges, edges if self.edge_values else None

    def extra_repr(self) -> str:
        """Sizes and mode, for ``repr``."""
        return f"{self.features}, heads={self.heads}, mode={self.mode!r}, edge_values={self.edge_values}"
