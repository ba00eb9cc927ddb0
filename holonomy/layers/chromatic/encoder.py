"""The layer of the chromatic graph transformer: attention, two linear maps, batch norm (CSA figure 1, section 3.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks, numerics
from holonomy._shapes import Bool, Float
from holonomy.layers.chromatic.attention import ChromaticAttention, DropoutOver, Mode, ProjectedEdges


class NodeBatchNorm(nn.BatchNorm1d):
    r"""Batch normalisation over the nodes of padded graphs: padding is neither counted nor returned.

    In training a channel has mean 0 and variance 1 over all nodes of the batch, before scale and shift; one node alone
    becomes the shift. In evaluation the running statistics take their place, so that graphs do not see each other.
    Statistics are computed in float32 at least, in three passes.

    ``eps`` and ``momentum`` are those of :class:`torch.nn.BatchNorm1d`; ``momentum=None``, which
    :func:`torch.optim.swa_utils.update_bn` sets for a while, counts every batch the same. As there, the running
    statistics do not change if ``track_running_stats`` is set to False, and if they are set to None those of the batch
    are used in evaluation, too. A batch without nodes leaves them as they are, and one node alone the variance.

    >>> norm, mask = NodeBatchNorm(1), torch.tensor([[True, True, False]])
    >>> norm(torch.tensor([[[3.0], [5.0], [100.0]]]), mask).detach().flatten().round()
    tensor([-1.,  1.,  0.])
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = numerics.BATCH_NORM_EPS,
        momentum: float | None = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.floating_dtype(dtype)
        checks.positive("eps", eps)
        if momentum is not None:
            checks.in_range("momentum", momentum, 0.0, 1.0)
        super().__init__(checks.positive_int("features", features), eps, momentum, device=device, dtype=dtype)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - the mask is what is new
        self, x: Float[Tensor, "graphs nodes features"], mask: Bool[Tensor, "graphs nodes"] | None = None
    ) -> Float[Tensor, "graphs nodes features"]:
        """Normalise ``(graphs, n, features)``; the mask ``(graphs, n)`` is ``True`` at nodes; zero elsewhere."""
        checks.last_axis("x", x, self.num_features, "features")
        if x.ndim != 3:
            raise ValueError(f"x must have shape (graphs, n, features), got {tuple(x.shape)}.")
        if mask is not None:
            checks.node_mask(mask, x.shape[:-1])
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide if mask is None else wide.masked_fill(~mask[..., None], 0.0)
        if self.training or self.running_mean is None or self.running_var is None:
            mean, variance = self._statistics(wide, mask)
        else:
            mean, variance = self.running_mean, self.running_var
        # Ioffe and Szegedy 2015, over the nodes that are there; padding gets zeros again afterwards.
        # The root and not its inverse, in whose gradient the cube of a number that is small already would be zero.
        out = (wide - mean) * (self.weight / (variance + self.eps).sqrt()) + self.bias
        out = out.to(x.dtype)
        return out if mask is None else out.masked_fill(~mask[..., None], 0.0)

    def _statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance of the batch."""
        count = x.new_full((), x.shape[0] * x.shape[1]) if mask is None else mask.sum()
        least = count.clamp(min=1)

        def offset_from(mean: Tensor) -> Tensor:
            return x - mean if mask is None else (x - mean).masked_fill(~mask[..., None], 0.0)

        mean = x.sum((0, 1)) / least
        # What the sum was rounded by: of equal numbers far from zero, it alone would be the variance.
        mean = mean + offset_from(mean).sum((0, 1)) / least
        # A pass of its own: the mean of squares less the square of the mean would lose the digits of a small variance.
        offset = offset_from(mean)
        squares = offset.square().sum((0, 1))
        if self.training and self.track_running_stats and self.running_mean is not None:
            with torch.no_grad():
                self._track(count, mean, squares)
        return mean, squares / least

    def _track(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        """Draw the running statistics towards those of the batch, the variance without its bias."""
        running_mean, running_variance = cast("Tensor", self.running_mean), cast("Tensor", self.running_var)
        batches = cast("Tensor", self.num_batches_tracked).add_(1)
        kind = running_mean.dtype
        # A batch without nodes has no mean, and one of a single node no variance: the rate is zero there.
        rate = batches.to(kind).reciprocal() if self.momentum is None else self.momentum
        running_mean.lerp_(mean.to(kind), (count > 0).to(kind) * rate)
        variance = squares / (count - 1).clamp(min=1)
        running_variance.lerp_(variance.to(kind), (count > 1).to(kind) * rate)


class ChromaticEncoderLayer(nn.Module):
    r"""Chromatic attention and two linear maps, each added to its input and then normalised, CSA section 3.5.

    .. math:: Y = \mathrm{BN}(X + \mathrm{CSA}(X, E)), \qquad \mathrm{BN}(Y + W_2\, \sigma(W_1 Y))

    Args:
        features: d.
        heads: number of heads.
        edge_features: of a pair; None where layers share a projection, see
            :class:`~holonomy.layers.ChromaticAttention`.
        feedforward: width between the two maps, 2 d if left out.
        mode: see :class:`~holonomy.layers.ChromaticAttention`.
        edge_values: see there.
        norm: ``"batch"``, over the nodes of all graphs (of all processes after
            :meth:`torch.nn.SyncBatchNorm.convert_sync_batchnorm`), or ``"layer"``, over the channels of each node.
        activation: :math:`\sigma`.
        dropout: probability that an entry of what is added, or between the two maps, is dropped.
        attention_dropout: of the filters.
        dropout_over: what of the filters is dropped.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer, or the activation no function.
        ValueError: if a size, probability or choice is not allowed.

    >>> layer = ChromaticEncoderLayer(8, 2, 3)
    >>> layer(torch.randn(4, 5, 8), torch.randn(4, 5, 5, 3)).shape
    torch.Size([4, 5, 8])
    """

    norm_attention: NodeBatchNorm | nn.SyncBatchNorm | nn.LayerNorm
    norm_feedforward: NodeBatchNorm | nn.SyncBatchNorm | nn.LayerNorm

    def __init__(
        self,
        features: int,
        heads: int,
        edge_features: int | None,
        *,
        feedforward: int | None = None,
        mode: Mode = "chromatic",
        edge_values: bool = True,
        norm: Literal["batch", "layer"] = "batch",
        activation: Callable[[Tensor], Tensor] = torch.relu,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        dropout_over: DropoutOver = "edges",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        checks.one_of("norm", norm, ("batch", "layer"))
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        checks.in_range("attention_dropout", attention_dropout, 0.0, 1.0)
        checks.positive_int("features", features)
        width = 2 * features if feedforward is None else checks.positive_int("feedforward", feedforward)
        checks.function("activation", activation)
        self.activation = activation
        self.attention = ChromaticAttention(
            features,
            heads,
            edge_features,
            mode=mode,
            edge_values=edge_values,
            dropout=attention_dropout,
            dropout_over=dropout_over,
            device=device,
            dtype=dtype,
        )
        normalise = NodeBatchNorm if norm == "batch" else nn.LayerNorm
        self.norm_attention = normalise(features, device=device, dtype=dtype)
        self.expand = nn.Linear(features, width, device=device, dtype=dtype)
        self.contract = nn.Linear(width, features, device=device, dtype=dtype)
        self.norm_feedforward = normalise(features, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "graphs nodes features"],
        edges: Float[Tensor, "graphs nodes nodes edge_features"] | ProjectedEdges | None = None,
        mask: Bool[Tensor, "graphs nodes"] | None = None,
    ) -> Float[Tensor, "graphs nodes features"]:
        """Apply the layer to ``(graphs, n, features)``; zero at padding.

        Arguments and errors are those of :meth:`holonomy.layers.ChromaticAttention.forward`.
        """
        checks.vectors(x=x)
        if mask is not None:
            checks.node_mask(mask, x.shape[:-1])
            x = x.masked_fill(~mask[..., None], 0.0)
        # Y, then the result, as in the formula above: the norm stands after each sum.
        x = self._normalised(self.norm_attention, x + self._dropped(self.attention(x, edges, mask)), mask)
        hidden = self._dropped(self.activation(self.expand(x)))
        return self._normalised(self.norm_feedforward, x + self._dropped(self.contract(hidden)), mask)

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)

    @staticmethod
    def _normalised(norm: NodeBatchNorm | nn.SyncBatchNorm | nn.LayerNorm, x: Tensor, mask: Tensor | None) -> Tensor:
        if isinstance(norm, NodeBatchNorm):
            return norm(x, mask)
        if isinstance(norm, nn.SyncBatchNorm):
            # What torch puts in the other's place; it takes rows of nodes.
            there = x.new_ones(x.shape[:-1], dtype=torch.bool) if mask is None else mask
            rows = norm(x[there])
            return torch.zeros_like(x, dtype=rows.dtype).index_put((there,), rows)
        out = norm(x)
        return out if mask is None else out.masked_fill(~mask[..., None], 0.0)
