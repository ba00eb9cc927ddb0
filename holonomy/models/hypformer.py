r"""Hypformer: a transformer whose every layer lies in hyperbolic space (Yang et al., KDD 2024, section 4.6, figure 4).

Points are ambient ``(..., d+1)``, time first. Curvatures are negative and, by default, learned: one for the input,
one between blocks, and two inside each block (attention and feed-forward).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._autograd import may_bypass
from holonomy._parts import Group
from holonomy.layers import (
    GCN,
    HRC,
    HTC,
    ExpMapHTC,
    HypDropout,
    HypLayerNorm,
    HypLinearAttention,
    HypMLR,
    HypPositionalEncoding,
    HypPrototypes,
    HypResidual,
    HypSoftmaxAttention,
)
from holonomy.layers.hyperbolic.feedforward import FeedForward
from holonomy.layers.hyperbolic.linear import space_of
from holonomy.layers.hyperbolic.midpoint import add_and_norm
from holonomy.layers.hyperbolic.refinement import change_curvature, drop_some, resolve
from holonomy.layers.hyperbolic.softmax_attention import KeyValueState
from holonomy.manifolds import Lorentz
from holonomy.manifolds.lorentz import require_lorentz
from holonomy.ops.heads import without_padding
from holonomy.ops.linear_attention.causal import LinearState
from holonomy.ops.linear_attention.reference import AVERAGES, Average
from holonomy.ops.propagation import check_graph
from holonomy.ops.softmax_attention import SIMILARITIES, Similarity
from holonomy.structures import Graph, PaddedGraphs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

__all__ = ["BlockState", "Hypformer", "HypformerBlock", "HypformerEncoder", "decoder_of"]

# What a block keeps of the tokens so far, by its attention.
BlockState = LinearState | KeyValueState


class HypformerBlock(nn.Module):
    """Position, attention, residual, LayerNorm, feed-forward, residual, LayerNorm: one block of figure 4.

    Residuals are Lorentzian midpoints of two points of one manifold; the last LayerNorm moves the result to the next
    block's curvature.

    Args:
        features: dimension of the space.
        heads: number of attention heads, a divisor of ``features``.
        manifold_in: where the input lies.
        manifold_out: where the output lies; ``manifold_in`` if left out.
        manifold_attention: where queries, keys and values lie; ``manifold_in`` if left out.
        manifold_feedforward: where the hidden layer of the feed-forward lies; ``manifold_in`` if left out.
        feedforward: dimension of that hidden layer; ``4 * features`` if left out.
        attention: ``"linear"`` (eqs. 14-19) or ``"softmax"`` (eqs. 3-5).
        similarity: what softmax attention compares, see :class:`~holonomy.layers.HypSoftmaxAttention`.
        power: the sharpening exponent p of linear attention (eq. 19).
        average: of linear attention: ``"space"`` parts as printed, or the ``"midpoint"``.
        token_positions: move each token towards a position computed from it (eq. 20).
        dropout: probability of dropping a space coordinate after attention and inside the feed-forward.
        activation: of the feed-forward, a function of space parts.
        norm_eps: added to the variance by the LayerNorms; a larger one buys a smaller Lipschitz constant.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        ValueError: if a choice is none of the allowed, or an option has no effect beside the others.

    >>> block = HypformerBlock(8, 2, Lorentz(-1.0))
    >>> block(block.manifold_in.lift(torch.zeros(5, 8))).shape
    torch.Size([5, 9])
    """

    def __init__(
        self,
        features: int,
        heads: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        manifold_attention: Lorentz | None = None,
        manifold_feedforward: Lorentz | None = None,
        feedforward: int | None = None,
        attention: Literal["linear", "softmax"] = "linear",
        similarity: Similarity = "geodesic_squared",
        power: float = 2.0,
        average: Average = "space",
        token_positions: bool = True,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        norm_eps: float = numerics.LAYER_NORM_EPS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.one_of("attention", attention, ("linear", "softmax"))
        checks.one_of("similarity", similarity, SIMILARITIES)
        checks.one_of("average", average, AVERAGES)
        checks.in_range("dropout", dropout, 0.0, 1.0)
        checks.in_range("norm_eps", norm_eps, 0.0, math.inf)
        require_lorentz("manifold_in", manifold_in)
        for name, inner in (("attention", manifold_attention), ("feedforward", manifold_feedforward)):
            if inner is not None:
                require_lorentz(f"manifold_{name}", inner)
        checks.in_range("power", power, 1.0, math.inf)
        _refuse_unread(attention, similarity=similarity, power=power, average=average)
        hidden = 4 * features if feedforward is None else checks.positive_int("feedforward", feedforward)
        self.manifold_in = manifold_in
        _, self.manifold_attention = resolve(manifold_in, manifold_attention, "manifold_attention")
        _, self.manifold_feedforward = resolve(manifold_in, manifold_feedforward, "manifold_feedforward")
        inner = self.manifold_feedforward
        self.position: HypPositionalEncoding | nn.Identity = nn.Identity()
        if token_positions:
            self.position = HypPositionalEncoding(features, manifold_in, device=device, dtype=dtype)
        self.attention: HypLinearAttention | HypSoftmaxAttention
        if attention == "linear":
            self.attention = HypLinearAttention(
                features,
                heads,
                manifold_in,
                manifold_hidden=self.manifold_attention,
                power=power,
                average=average,
                device=device,
                dtype=dtype,
            )
        else:
            self.attention = HypSoftmaxAttention(
                features,
                heads,
                manifold_in,
                manifold_hidden=self.manifold_attention,
                similarity=similarity,
                device=device,
                dtype=dtype,
            )
        self.drop = HypDropout(dropout, manifold_in)
        self.residual = HypResidual(manifold_in)
        self.norm_attention = HypLayerNorm(features, manifold_in, eps=norm_eps, device=device, dtype=dtype)
        self.feedforward = FeedForward(
            HTC(features, hidden, manifold_in, inner, device=device, dtype=dtype),
            HRC(_ActivationDropout(activation, dropout), inner),
            HTC(hidden, features, inner, manifold_in, device=device, dtype=dtype),
            HypDropout(dropout, manifold_in),
        )
        self.norm_feedforward = HypLayerNorm(
            features, manifold_in, manifold_out, eps=norm_eps, device=device, dtype=dtype
        )

    @property
    def manifold_out(self) -> Lorentz:
        """Where the output lies."""
        return self.norm_feedforward.manifold_out

    def forward(
        self,
        x: Float[Tensor, "... nodes ambient"],
        key_padding_mask: Bool[Tensor, "... keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "... keys ambient"] | None = None,
        group: Group | None = None,
    ) -> Float[Tensor, "... nodes ambient"]:
        """Apply the block.

        Args:
            x: points of ``manifold_in``, one graph ``(nodes, d+1)`` or padded ones ``(graphs, nodes, d+1)``.
            key_padding_mask: ``(graphs, nodes)``, ``True`` where a node is padding and not to be attended to; of the
                tokens of ``memory`` if there is one.
            attn_mask: pairs that must not attend, with softmax attention; see
                :class:`~holonomy.layers.HypSoftmaxAttention`.
            is_causal: no node attends to later ones.
            memory: points of ``manifold_in`` to which x attends instead of to itself.
            group: with linear attention, processes that share the nodes, of which x are those of this one.

        Returns:
            Points of ``manifold_out``, shaped as ``x``.

        Raises:
            ValueError: if there is an ``attn_mask`` with linear attention, a ``group`` with softmax attention, or
                ``is_causal`` beside ``memory`` or ``group``.
        """
        checks.vectors(x=x)
        if memory is None:
            # What padding holds goes nowhere, but it would come out again, and infinities are no points.
            x = without_padding(x, key_padding_mask)
        x = self.position(x)
        # An attention of the user's own need not know of processes.
        shared = {} if group is None else {"group": group}
        attended = self.attention(
            x, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal, memory=memory, **shared
        )
        return self._fed_forward(x, attended)

    def step(
        self, x: Float[Tensor, "... nodes ambient"], state: BlockState | None = None
    ) -> tuple[Float[Tensor, "... nodes ambient"], BlockState]:
        """The next tokens of a sequence, as the causal pass over all of it gives them.

        Args:
            x: points of ``manifold_in``, ``(*batch, nodes, d+1)``: one token, or several.
            state: what the step before returned; ``None`` at the first.

        Returns:
            Points of ``manifold_out``, and the state after them, that of the attention.

        >>> block = HypformerBlock(8, 2, Lorentz(-1.0))
        >>> x = block.manifold_in.lift(torch.randn(6, 8))
        >>> first, state = block.step(x[:5])
        >>> last, state = block.step(x[5:], state)
        >>> torch.allclose(torch.cat([first, last]), block(x, is_causal=True), atol=1e-4)
        True
        """
        checks.vectors(x=x)
        x = self.position(x)
        # Each attention refuses the state of the other.
        attended, after = self.attention.step(x, cast("Any", state))
        return self._fed_forward(x, attended), after

    def _fed_forward(self, x: Tensor, attended: Tensor) -> Tensor:
        """From position and attention on: figure 4 upwards."""
        x = add_and_norm(self.residual, self.norm_attention, x, drop_some(self.drop, attended))
        return add_and_norm(self.residual, self.norm_feedforward, x, self.feedforward(x))


# Of each attention, the options of the other with their defaults.
_UNREAD = {"linear": {"similarity": "geodesic_squared"}, "softmax": {"power": 2.0, "average": "space"}}


def _refuse_unread(attention: str, **options: float | str) -> None:
    for name, default in _UNREAD[attention].items():
        if options[name] != default:
            raise ValueError(
                f"{name} must be left out with attention {attention!r}, where it has no effect, got {options[name]!r}."
            )


class HypformerEncoder(nn.Module):
    """The hyperbolic branch of figure 4: features to points by exponential map and HTC, then blocks.

    Each manifold has a curvature of its own: of the input, before each block, two inside it, and of the output.
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        manifold_out: Lorentz,
        *,
        layers: int = 2,
        heads: int = 1,
        feedforward: int | None = None,
        attention: Literal["linear", "softmax"] = "linear",
        similarity: Similarity = "geodesic_squared",
        power: float = 2.0,
        average: Average = "space",
        token_positions: bool = True,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        norm_eps: float = numerics.LAYER_NORM_EPS,
        curvature: float = -1.0,
        learnable_curvature: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.positive_int("layers", layers)
        checks.in_range("output_dropout", output_dropout, 0.0, 1.0)

        def manifold() -> Lorentz:
            return Lorentz(curvature, learnable=learnable_curvature, device=device, dtype=dtype)

        between = [manifold() for _ in range(layers)] + [manifold_out]
        blocks = [
            HypformerBlock(
                features,
                heads,
                before,
                after,
                manifold_attention=manifold(),
                manifold_feedforward=manifold(),
                feedforward=feedforward,
                attention=attention,
                similarity=similarity,
                power=power,
                average=average,
                token_positions=token_positions,
                dropout=dropout,
                activation=activation,
                norm_eps=norm_eps,
                device=device,
                dtype=dtype,
            )
            for before, after in itertools.pairwise(between)
        ]
        self.embedding = ExpMapHTC(in_features, features, manifold(), between[0], device=device, dtype=dtype)
        self.refine = HRC(_ActivationDropout(activation, dropout), between[0])
        self.blocks = nn.ModuleList(blocks)
        self.drop = HypDropout(output_dropout, manifold_out)

    def points(self, x: Tensor) -> Float[Tensor, "*batch ambient"]:
        """Where the blocks start."""
        if not may_bypass(self.refine, HRC):
            return self.refine(self.embedding(x))
        # The time of the embedding is read by nobody.
        there = self.refine.manifold_out
        return change_curvature(self.refine.function(space_of(self.embedding, x)), self.refine.manifold_in, there)

    def forward(
        self,
        x: Float[Tensor, "... nodes ambient"],
        key_padding_mask: Bool[Tensor, "... nodes"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        group: Group | None = None,
    ) -> Float[Tensor, "... nodes ambient"]:
        """Apply the blocks."""
        for block in self.blocks:
            x = block(x, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal, group=group)
        return self.drop(x)

    def step(
        self, x: Float[Tensor, "... nodes ambient"], state: tuple[BlockState, ...] | None = None
    ) -> tuple[Float[Tensor, "... nodes ambient"], tuple[BlockState, ...]]:
        """Apply the blocks to the next tokens of a sequence."""
        self.check_state(state)
        states = [None] * len(self.blocks) if state is None else state
        after: list[BlockState] = []
        for block, before in zip(self.blocks, states, strict=True):
            x, kept = cast("HypformerBlock", block).step(x, before)
            after.append(kept)
        return self.drop(x), tuple(after)

    def check_state(self, state: object) -> None:
        """Refuse what is not a state for each block."""
        if state is not None and (not isinstance(state, tuple) or len(state) != len(self.blocks)):
            raise TypeError(
                f"state must be what step returned, a tuple of {len(self.blocks)}, got {type(state).__name__}."
            )

    def curvatures(self) -> dict[str, Float[Tensor, " 1"]]:
        """The curvature of every manifold but the last, by where it lies."""
        named = {"input": self.embedding.manifold_in}
        for index, module in enumerate(self.blocks):
            block = cast("HypformerBlock", module)
            named[f"block{index}"] = block.manifold_in
            named[f"block{index}.attention"] = block.manifold_attention
            named[f"block{index}.feedforward"] = block.manifold_feedforward
        return {name: manifold.curvature for name, manifold in named.items()}


def decoder_of(
    kind: Literal["linear", "mlr", "prototypes"],
    features: int,
    out_features: int,
    manifold: Lorentz,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Linear | HypMLR | HypPrototypes:
    """Make the decoder of a hyperbolic model."""
    checks.one_of("decoder", kind, ("linear", "mlr", "prototypes"))
    if kind == "linear":
        return nn.Linear(features, out_features, device=device, dtype=dtype)
    classifier = HypMLR if kind == "mlr" else HypPrototypes
    return classifier(features, out_features, manifold, device=device, dtype=dtype)


class Hypformer(nn.Module):
    r"""Hypformer, with an optional graph encoder in parallel (section 4.6, figure 4).

    Node features are mapped into hyperbolic space by the exponential map at the origin, then by HTC; blocks of linear
    (or softmax) attention follow, each layer with a curvature of its own. Beside them a graph neural network reads the
    same features; both are mixed in the tangent space at the origin,

    .. math:: z = (1 - w) \log_o(x) + w\, g, \qquad w = \text{graph\_weight},

    and decoded. Train it with :class:`holonomy.optim.RiemannianAdam`; without prototypes all parameters are Euclidean
    and any optimizer of torch will do.

    Args:
        in_features: number of features of a node.
        hidden_features: dimension of the hyperbolic spaces, and of the graph encoder's output.
        out_features: number of classes, or of regression targets.
        layers: number of blocks.
        heads: attention heads per block, a divisor of ``hidden_features``.
        feedforward: hidden dimension of each feed-forward; ``4 * hidden_features`` if left out.
        attention: ``"linear"``, at a cost linear in the nodes, or ``"softmax"``.
        similarity: what softmax attention compares, see :class:`~holonomy.layers.HypSoftmaxAttention`.
        power: the sharpening exponent p of linear attention (eq. 19).
        average: of linear attention: ``"space"`` parts as printed, or the ``"midpoint"``.
        dropout: probability of dropping a space coordinate, after the first HTC and in the blocks.
        output_dropout: the same, on the transformer's output before it is mixed with the graph encoder's.
        activation: a function of space parts, after the first HTC and in the feed-forwards.
        norm_eps: added to the variance by the LayerNorms.
        curvature: the initial curvature of every manifold.
        learnable_curvature: whether the curvatures receive gradients.
        transformer: ``False`` leaves the graph encoder alone, for comparison; what shapes blocks is not read then.
        graph_encoder: any module called as ``(x, edge_index)``, with ``edge_weight=`` or ``edge_attr=`` where they are
            given, that gives ``(n, hidden_features)``: a convolution of PyTorch Geometric, say; ``"gcn"`` for a
            :class:`~holonomy.layers.GCN` of two layers; ``None`` for no graph at all.
        graph_weight: the weight w of the graph encoder, where there is a transformer beside it.
        level: what a row of the result belongs to, ``"graph"`` or ``"node"``; if left out, a graph where ``batch`` is
            given, else a node.
        decoder: ``"linear"`` on the logarithm at the origin, ``"mlr"`` for hyperbolic multinomial logistic regression,
            or ``"prototypes"``: one learned point a class.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        TypeError: if an argument is of another type than it says.
        ValueError: if a size, probability, weight or choice is none of the allowed, if an option of the other attention
            is given, or if both branches are left out.

    A model that learns to tell the two ends of a path apart:

    >>> from holonomy.optim import RiemannianAdam
    >>> _ = torch.manual_seed(0)
    >>> path = torch.stack([torch.arange(9), torch.arange(1, 10)])
    >>> edge_index = torch.cat([path, path.flip(0)], dim=1)  # both directions, as in PyTorch Geometric
    >>> x, y = torch.randn(10, 4), (torch.arange(10) >= 5).long()
    >>> model = Hypformer(4, 8, 2, layers=1)
    >>> optimizer = RiemannianAdam(model.parameters(), lr=0.02)
    >>> for _ in range(60):
    ...     optimizer.zero_grad()
    ...     loss = nn.functional.cross_entropy(model(x, edge_index), y)
    ...     loss.backward()
    ...     optimizer.step()
    >>> bool((model(x, edge_index).argmax(-1) == y).all())
    True
    >>> sorted(model.curvatures())
    ['block0', 'block0.attention', 'block0.feedforward', 'input', 'output']
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
        attention: Literal["linear", "softmax"] = "linear",
        similarity: Similarity = "geodesic_squared",
        power: float = 2.0,
        average: Average = "space",
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        norm_eps: float = numerics.LAYER_NORM_EPS,
        curvature: float = -1.0,
        learnable_curvature: bool = True,
        transformer: bool = True,
        graph_encoder: nn.Module | Literal["gcn"] | None = "gcn",
        graph_weight: float = 0.5,
        level: Literal["graph", "node"] | None = None,
        decoder: Literal["linear", "mlr", "prototypes"] = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = checks.positive_int("in_features", in_features)
        self.hidden_features = checks.positive_int("hidden_features", hidden_features)
        checks.positive_int("out_features", out_features)
        checks.positive_int("layers", layers)
        checks.in_range("output_dropout", output_dropout, 0.0, 1.0)
        checks.one_of("decoder", decoder, ("linear", "mlr", "prototypes"))
        if level is not None:
            checks.one_of("level", level, ("graph", "node"))
        self.level = level
        if isinstance(graph_encoder, str):
            checks.one_of("graph_encoder", graph_encoder, ("gcn",))
            graph_encoder = GCN(
                in_features, hidden_features, hidden_features, dropout=dropout, device=device, dtype=dtype
            )
        if not (graph_encoder is None or isinstance(graph_encoder, nn.Module)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"graph_encoder must be a module, 'gcn' or None, got {graph_encoder!r}.")
        if graph_encoder is None and not transformer:
            raise ValueError("graph_encoder must be a module or 'gcn' when transformer is False, got None.")
        self.graph_weight = checks.in_range("graph_weight", graph_weight, 0.0, 1.0)
        self.graph_encoder = graph_encoder

        # With neither a transformer nor a hyperbolic decoder nothing would move this curvature.
        moved = learnable_curvature and (transformer or decoder != "linear")
        self.manifold_out = Lorentz(curvature, learnable=moved, device=device, dtype=dtype)
        # Where it is left out it takes no memory and no random numbers, and wrong options are refused all the same.
        encoder = HypformerEncoder(
            in_features,
            hidden_features,
            self.manifold_out,
            layers=layers,
            heads=heads,
            feedforward=feedforward,
            attention=attention,
            similarity=similarity,
            power=power,
            average=average,
            dropout=dropout,
            output_dropout=output_dropout,
            activation=activation,
            norm_eps=norm_eps,
            curvature=curvature,
            learnable_curvature=learnable_curvature,
            device=device if transformer else "meta",
            dtype=dtype,
        )
        self.encoder = encoder if transformer else None
        # Kept apart from the decoder's class, so that another module may stand in its place.
        self.decodes_points = decoder != "linear"
        self.decoder = decoder_of(decoder, hidden_features, out_features, self.manifold_out, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        edge_index: Int[Tensor, "2 edges"] | Graph | None = None,
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | None = None,
        edge_weight: Float[Tensor, " edges"] | None = None,
        num_graphs: int | None = None,
        group: Group | None = None,
    ) -> Float[Tensor, "rows out"]:
        """Scores of every node, or of every graph where ``batch`` is given.

        Args:
            x: node features ``(n, in_features)``; sparse ones, CSR or COO, are multiplied sparsely.
            edge_index: ``(2, m)``, each edge in both directions, or a :class:`~holonomy.structures.Graph` that
                ``graph_encoder`` takes; read by it only.
            batch: the graph of each node ``(n,)``, numbered from zero; one graph if left out. Nodes attend within
                their graph.
            edge_attr: edge features ``(m, edge_features)``, for a ``graph_encoder`` that takes them.
            edge_weight: ``(m,)``, for a ``graph_encoder`` that takes them, as the GCN does.
            num_graphs: their number, where some at the end have no node.
            group: processes that share the nodes of one graph, of which ``x`` are those of this one. It takes linear
                attention and no graph encoder, as edges join the nodes of different processes: give features that were
                propagated before, by :func:`holonomy.distributed.propagate_rows`.

        Returns:
            ``(n, out_features)``, or ``(graphs, out_features)`` at the level of graphs, each decoded at the Lorentzian
            centroid of its nodes.

        Raises:
            ValueError: if there is a graph encoder and no ``edge_index``, if ``x`` has another number of features, or
                if there is a ``group`` beside softmax attention, a graph encoder or ``batch``.
        """
        checks.only_with_batch(num_graphs, batch)
        mixed = self._mix(x, edge_index, batch, edge_attr, edge_weight, group)
        if self.level == "graph" and group is not None:
            mixed = self._at_origin(self.manifold_out.centroid(self._points(mixed), group=group)[None])
        elif self.level == "graph" or (self.level is None and batch is not None):
            batch = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device) if batch is None else batch
            graphs = PaddedGraphs.of(self._points(mixed), batch, num_graphs)
            pooled = self.manifold_out.centroid(graphs.values, (~graphs.padding).to(mixed.dtype))
            mixed = self._at_origin(pooled)
        elif num_graphs is not None:
            checks.number_of_graphs(batch, num_graphs)
        return self.decoder(self._points(mixed) if self.decodes_points else mixed)

    def embed(
        self,
        x: Tensor,
        edge_index: Int[Tensor, "2 edges"] | Graph | None = None,
        batch: Int[Tensor, " nodes"] | None = None,
        *,
        edge_attr: Float[Tensor, "edges dim_edge"] | None = None,
        edge_weight: Float[Tensor, " edges"] | None = None,
        group: Group | None = None,
    ) -> Float[Tensor, "nodes ambient"]:
        """What the decoder reads of each node, as points of ``manifold_out``.

        Args:
            x: as in :meth:`forward`.
            edge_index: as in :meth:`forward`.
            batch: as in :meth:`forward`; nodes attend within their graph.
            edge_attr: as in :meth:`forward`.
            edge_weight: as in :meth:`forward`.
            group: as in :meth:`forward`.

        Returns:
            Points ``(n, hidden_features + 1)``.

        >>> model = Hypformer(3, 4, 2, graph_encoder=None)
        >>> model.embed(torch.zeros(5, 3)).shape
        torch.Size([5, 5])
        """
        return self._points(self._mix(x, edge_index, batch, edge_attr, edge_weight, group))

    def curvatures(self) -> dict[str, Float[Tensor, " 1"]]:
        """The curvature of every manifold, by where it lies.

        Returns:
            ``"input"``, then per block ``"block0"`` (its input and residuals), ``"block0.attention"``,
            ``"block0.feedforward"``, ..., then ``"output"``.
        """
        named = {} if self.encoder is None else self.encoder.curvatures()
        return named | {"output": self.manifold_out.curvature}

    def _points(self, tangent: Float[Tensor, "... dim"]) -> Float[Tensor, "... ambient"]:
        return self.manifold_out.expmap0(nn.functional.pad(tangent, (1, 0)))

    def _at_origin(self, x: Float[Tensor, "... ambient"]) -> Float[Tensor, "... dim"]:
        return self.manifold_out.space(self.manifold_out.logmap0(x))

    @staticmethod
    def _encoded(encoder: HypformerEncoder, x: Tensor, batch: Tensor | None, group: Group | None) -> Tensor:
        if batch is None:
            return encoder(encoder.points(x), group=group)
        graphs = PaddedGraphs.of(encoder.points(x), batch)
        return graphs.rows(encoder(graphs.values, graphs.padding))

    def _mix(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None,
        batch: Tensor | None,
        edge_attr: Tensor | None,
        edge_weight: Tensor | None,
        group: Group | None,
    ) -> Float[Tensor, "nodes dim"]:
        """Both branches in the tangent space at the origin."""
        checks.last_axis("x", x, self.in_features, "in_features", sparse=True)
        of_edges = {"edge_attr": edge_attr, "edge_weight": edge_weight}
        of_edges = {name: value for name, value in of_edges.items() if value is not None}
        if of_edges and (edge_index is None or self.graph_encoder is None):
            raise ValueError(f"{next(iter(of_edges))} must be None without a graph encoder and its edge_index.")
        if edge_index is not None:
            check_graph(x, edge_index, batch, edge_weight)
        if group is not None:
            self._refuse_sharded(batch)
        branches: list[Tensor] = []
        if self.encoder is not None:
            branches.append(self._at_origin(self._encoded(self.encoder, x, batch, group)))
        if self.graph_encoder is not None:
            if edge_index is None:
                raise ValueError("edge_index must be given, for the model has a graph encoder; got None.")
            encoded = self.graph_encoder(x, edge_index, **of_edges)
            wanted = (x.shape[0], self.hidden_features)
            if encoded.shape != wanted:
                raise ValueError(
                    f"graph_encoder must give (nodes, hidden_features) = {wanted}, got {tuple(encoded.shape)}."
                )
            branches.append(encoded)
        return branches[0] if len(branches) == 1 else torch.lerp(branches[0], branches[1], self.graph_weight)

    def _refuse_sharded(self, batch: Tensor | None) -> None:
        """What nodes on several processes are not taken with."""
        if self.graph_encoder is not None:
            raise ValueError(
                "group must be None beside a graph encoder, whose edges join nodes of different processes; make the "
                f"model with graph_encoder=None and propagate the features before, got {type(self.graph_encoder)}."
            )
        if batch is not None:
            raise ValueError("batch must be None with group: processes share the nodes of one graph, got several.")


class _ActivationDropout(nn.Module):
    """Two refinements in a row, merged into one as below eq. 21."""

    def __init__(self, activation: Callable[[Tensor], Tensor], dropout: float) -> None:
        super().__init__()
        checks.function("activation", activation)
        self.activation = activation
        self.dropout = nn.Dropout(checks.in_range("dropout", dropout, 0.0, 1.0))

    def refinements(self) -> tuple[Callable[[Tensor], Tensor], ...]:
        return self.activation, self.dropout

    def forward(self, space: Tensor) -> Tensor:
        return self.dropout(self.activation(space))
