r"""What the theorems on attention need of one layer: its projections, and its meaning as a formula.

N-simplicial attention (Simplicial section 2.2) of tokens X, ``(n, d)``, per head: :math:`q = X W_K^0 + b_K^0`,
:math:`k^m = X W_K^m + b_K^m`, :math:`v^m = X W_V^m + b_V^m` for :math:`1 \le m \le N`. For a tuple
:math:`K = (k_1, \dots, k_N)` of tokens, :math:`\kappa_K` and :math:`T_K` are the entrywise products of its keys and
values, and

.. math:: f_i = \sum_K A_{iK} T_K, \qquad A_i = \mathrm{softmax}_K\; s\,\langle q_i, \kappa_K\rangle .

Heads are concatenated and multiplied by the output matrix. N = 1 is ordinary attention. The determinant form (section
2.4) has the generalised cross product of the keys, chunk by chunk of N+1 channels, for :math:`\kappa_K`: it is as long
as the product of its keys' lengths at most, which is all that the theorems ask.

Masks are ``(n, ..., n)``, one axis for the query and one for each key, ``True`` at simplexes that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce, singledispatch
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from holonomy import checks
from holonomy._shapes import Bool, Float
from holonomy.layers import SimplicialAttention


class NotCoveredError(ValueError):
    """The theorems do not cover this layer or input, and no number is made up in their place.

    >>> issubclass(NotCoveredError, ValueError)
    True
    """


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Whose classes compute what they say, and the methods that say nothing of it.
_KNOWN = ("holonomy.", "torch.nn.modules.", "geoopt.")
_SILENT = {"extra_repr", "reset_parameters"}
# Parts that are not looked at: a graph encoder is where it is followed, and of parametrizations the weights are read.
_APART = {"graph_encoder", "parametrizations"}


def as_stated(layer: object, kind: type) -> None:
    """Refuse a layer that computes something else than the class that a theorem is on, itself or in a part of it.

    It may do so by its class, a method of its own or a hook.
    """
    everywhere = nn.modules.module
    of_all = any(getattr(everywhere, f"_global{hooks}") for hooks in _HOOKS)
    for part in layer.modules() if isinstance(layer, nn.Module) else ():
        if of_all or any(getattr(part, hooks) for hooks in _HOOKS):
            raise NotCoveredError(
                "layer must have no forward hooks, by which it may compute something else, "
                f"got some at {type(part).__name__}."
            )
    if kind not in type(layer).__mro__:
        raise NotCoveredError(f"layer must be a {kind.__name__}, got {type(layer).__name__}.")
    for part in _parts(layer) if isinstance(layer, nn.Module) else ():
        base, methods, replaced = _methods(type(part))
        own = replaced | (methods & vars(part).keys())
        if own:
            raise NotCoveredError(
                f"layer must compute what {base.__name__} does, "
                f"got {type(part).__name__} with a {', '.join(sorted(own))} of its own."
            )


def _parts(layer: nn.Module) -> Iterator[nn.Module]:
    yield layer
    for name, part in layer.named_children():
        if name not in _APART:
            yield from _parts(part)


def _methods(kind: type) -> tuple[type, frozenset[str], set[str]]:
    """The known class that a class inherits from, the methods by which it computes, and those that are replaced."""
    kinds = kind.__mro__
    base = next(each for each in kinds if issubclass(each, nn.Module) and each.__module__.startswith(_KNOWN))
    methods = _computing(base)
    return base, methods, {name for own in kinds[: kinds.index(base)] for name in methods & vars(own).keys()}


@cache
def _computing(base: type) -> frozenset[str]:
    """The methods by which a known class computes."""
    if base is nn.Module:
        return frozenset()
    methods = {"forward", "__call__"}
    for each in base.__mro__[: base.__mro__.index(nn.Module)]:
        computing = {name for name, value in vars(each).items() if callable(value) or isinstance(value, property)}
        methods |= {name for name in computing if not name.startswith("__")}
    return frozenset(methods - _SILENT)


def refuse_rotations(layer: object) -> None:
    """Refuse hyperbolic attention whose queries and keys are turned by their positions."""
    if getattr(layer, "rope", False):
        raise NotCoveredError("layer must be made without rope: no theorem here is on rotary positions.")


@dataclass(frozen=True)
class Projections:
    """One attention layer, as the theorems see it. Matrices multiply rows from the right.

    A matrix or bias of another shape than its line says, and an option that is none, are a ValueError; so is a skip
    connection where input and output differ in width.

    >>> layer = Projections(torch.ones(3, 1, 1, 1), torch.ones(2, 1, 1, 1))
    >>> layer.order, layer.scale
    (2, 1.0)
    """

    #: :math:`W_K^0, \dots, W_K^N`, ``(N+1, heads, d, d_h)``, the query's first
    keys: Float[Tensor, "slots heads d d_h"]
    values: Float[Tensor, "order heads d d_v"]  #: :math:`W_V^1, \dots, W_V^N`, ``(N, heads, d, d_v)``
    #: the output matrix ``(heads * d_v, d_out)``; heads are only concatenated if left out
    out: Float[Tensor, "heads_d_v d_out"] | None = None
    key_bias: Float[Tensor, "slots heads d_h"] | None = None  #: ``(N+1, heads, d_h)``, none if left out
    value_bias: Float[Tensor, "order heads d_v"] | None = None  #: ``(N, heads, d_v)``, none if left out
    out_bias: Float[Tensor, " d_out"] | None = None  #: ``(d_out,)``, none if left out
    scale: float = math.nan  #: of the logits, finite and not negative; :math:`1/\sqrt{d_h}` if left out
    skip: bool = False  #: whether the input is added to the result
    causal: bool = False  #: whether a query sees only simplexes none of whose keys comes after it
    #: for each key, within how many places of the query, itself the first, it must be, 1 at least; anywhere if left out
    window: tuple[int, ...] | None = None
    form: Literal["product", "determinant"] = "product"  #: of the logits

    def __post_init__(self) -> None:
        """Check that the matrices fit."""
        checks.floating("keys", self.keys)
        checks.floating("values", self.values)
        if self.keys.ndim != 4 or self.keys.shape[0] < 2:
            raise ValueError(f"keys must be (N+1, heads, d, d_h), N at least 1, got {tuple(self.keys.shape)}.")
        slots, heads, features, channels = self.keys.shape
        if self.values.ndim != 4 or self.values.shape[:3] != (slots - 1, heads, features):
            raise ValueError(
                f"values must be (N, heads, d, d_v) beside keys (N+1, heads, d, d_h) = {tuple(self.keys.shape)}, "
                f"got {tuple(self.values.shape)}."
            )
        self._check_output(slots, heads, features, channels)
        if self.window is not None and len(self.window) != self.order:
            raise ValueError(f"window must have a number for each of N = {self.order} keys, got {self.window}.")
        for places in self.window or ():
            checks.positive_int("window", places)
        checks.one_of("form", self.form, ("product", "determinant"))
        checks.flags(skip=self.skip, causal=self.causal)
        if math.isnan(self.scale):
            object.__setattr__(self, "scale", channels**-0.5)
        checks.in_range("scale", self.scale, 0.0, math.inf)
        checks.finite_number("scale", self.scale)

    def _check_output(self, slots: int, heads: int, features: int, channels: int) -> None:
        """Check the output matrix and the biases: one that broadcasts would be longer than its norm says."""
        inner, values = heads * self.values.shape[3], self.values.shape[3]
        if self.out is not None and (self.out.ndim != 2 or self.out.shape[0] != inner):
            raise ValueError(f"out must be (heads * d_v = {inner}, d_out), got {tuple(self.out.shape)}.")
        for name, bias, shape, symbols in (
            ("key_bias", self.key_bias, (slots, heads, channels), "(N+1, heads, d_h) = "),
            ("value_bias", self.value_bias, (slots - 1, heads, values), "(N, heads, d_v) = "),
            ("out_bias", self.out_bias, (self.width,), "(d_out,) = "),
        ):
            if bias is not None:
                checks.shaped(name, bias, shape, symbols)
        if self.skip and self.width != features:
            raise ValueError(f"skip must be False where d_out = {self.width} is not d = {features}, got True.")

    @property
    def order(self) -> int:
        """N: how many keys a query meets at once."""
        return self.values.shape[0]

    @property
    def width(self) -> int:
        """How many features a token has after the layer: d_out."""
        return self.values.shape[1] * self.values.shape[3] if self.out is None else self.out.shape[1]

    @property
    def masks(self) -> bool:
        """Whether it leaves out simplexes by itself."""
        return self.causal or self.window is not None

    def to(self, dtype: torch.dtype) -> Projections:
        """Cast every tensor to a floating-point dtype."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(dtype) for name, value in tensors.items()})

    def allowed(self, tokens: int, mask: Bool[Tensor, "..."] | None = None) -> Bool[Tensor, "queries tuples"] | None:
        """The simplexes that count, ``(n, n^N)``, by a mask, by causality and by windows; None if all do.

        A ``mask`` is ``(n, ..., n)``, N+1 axes, ``True`` at simplexes that count. One of another shape is a ValueError,
        one of another dtype a TypeError.
        """
        if mask is not None:
            checks.boolean("mask", mask, (tokens,) * (self.order + 1), "simplexes that count", "(n, ..., n) = ")
        allowed = None if mask is None else mask.reshape(tokens, -1)
        if not self.masks:
            return allowed
        at = torch.arange(tokens, device=self.keys.device)
        places = [axis.reshape(-1) for axis in torch.meshgrid(*[at] * self.order, indexing="ij")]
        for key, place in enumerate(places):
            apart = (at[:, None] - place).abs()
            near = apart >= 0 if self.window is None else apart < self.window[key]
            seen = near & (place <= at[:, None]) if self.causal else near
            allowed = seen if allowed is None else allowed & seen
        return allowed


class Heads(NamedTuple):
    r"""The parts of one layer on one input, per head."""

    keys: Tensor  # q, k^1, ..., k^N, (N+1, heads, n, d_h)
    values: Tensor  # v^1, ..., v^N, (N, heads, n, d_v)
    kappa: Tensor  # kappa_K, (heads, n^N, d_h)
    products: Tensor  # T_K, (heads, n^N, d_v)
    weights: Tensor  # A, (heads, n, n^N); zero in the row of a query without simplexes


def check_tokens(x: Float[Tensor, "tokens d"], layer: Projections | None = None) -> None:
    """Refuse anything but finite tokens of a layer, one at least."""
    checks.matrix("x", x, "n", "d", None if layer is None else layer.keys.shape[2])
    if not len(x):
        raise ValueError(f"x must have one token at least, got shape {tuple(x.shape)}.")
    checks.finite("x", x)


def attention_heads(x: Float[Tensor, "tokens d"], layer: Projections, mask: Bool[Tensor, "..."] | None = None) -> Heads:
    """Evaluate the parts of a layer as they are defined, in memory of order n^(N+1)."""
    keys, values = x @ layer.keys, x @ layer.values
    if layer.key_bias is not None:
        keys = keys + layer.key_bias[:, :, None]
    if layer.value_bias is not None:
        values = values + layer.value_bias[:, :, None]
    kappa = tuple_products(keys[1:].unbind()) if layer.form == "product" else _cross(keys[1:])
    products = tuple_products(values.unbind())
    logits = layer.scale * keys[0] @ kappa.mT
    allowed = layer.allowed(x.shape[0], mask)
    if allowed is None:
        return Heads(keys, values, kappa, products, logits.softmax(-1))
    weights = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(-1)
    return Heads(keys, values, kappa, products, weights.masked_fill(~allowed, 0.0))


def attend(
    x: Float[Tensor, "tokens d"], layer: Projections, mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "tokens d_out"]:
    """Attention as it is defined: the function whose constants the theorems bound. For small n^(N+1)."""
    heads = attention_heads(x, layer, mask)
    result = (heads.weights @ heads.products).movedim(0, 1).flatten(1)
    if layer.out is not None:
        result = result @ layer.out
    if layer.out_bias is not None:
        result = result + layer.out_bias
    return x + result if layer.skip else result


@singledispatch
def projections(layer: Any) -> Projections:
    """Read the projections of a layer.

    A module of one's own takes part by a method ``projections()`` that returns the fields of :class:`Projections` as
    a mapping from names to tensors and numbers; one that cannot be changed by ``projections.register(its class)``.
    """
    offer = getattr(layer, "projections", None)
    if not callable(offer):
        raise NotCoveredError(
            "layer must be a hyperbolic layer that a theorem covers, torch.nn.MultiheadAttention, or one with a method "
            f"projections(), got {type(layer).__name__}; assert_lipschitz tests a bound that you derived yourself."
        )
    offered = cast("Any", offer())
    return offered if isinstance(offered, Projections) else Projections(**offered)


def read_stack(layers: Sequence[Any]) -> list[Projections]:
    """Read the projections of layers that follow each other, each of which takes what the one before it gives."""
    read = [projections(layer) for layer in layers]
    for index, (before, after) in enumerate(pairwise(read), 1):
        if after.keys.shape[2] != before.width:
            raise ValueError(
                f"layers must take as many features as the layer before them gives, got {before.width} and a layer "
                f"{index} that takes {after.keys.shape[2]}."
            )
    return read


def as_function(layer: Any, mask: Bool[Tensor, "..."] | None = None) -> Callable[[Tensor], Tensor]:
    """Take a layer as a function of its tokens alone, to be differentiated both ways."""
    try:
        return partial(attend, layer=projections(layer), mask=mask)
    except NotCoveredError:
        if mask is not None:
            raise
    checks.function("layer", layer)
    whole = cast("Callable[..., Any]", layer)
    itself = isinstance(layer, nn.MultiheadAttention)

    def function(x: Tensor) -> Tensor:
        # The fused kernels of scaled dot products have no forward mode.
        with sdpa_kernel(SDPBackend.MATH):
            return whole(x, x, x)[0] if itself else whole(x)

    return function


@projections.register(Projections)
def _same(layer: Projections) -> Projections:
    return layer


@projections.register(nn.MultiheadAttention)
def _of_multihead(layer: nn.MultiheadAttention) -> Projections:
    as_stated(layer, nn.MultiheadAttention)
    if layer.dropout > 0 and layer.training:
        raise NotCoveredError("layer must not drop attention weights: the theorems describe one function; call eval().")
    if layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn:
        raise NotCoveredError("layer must not have bias_k, bias_v or add_zero_attn: they are tokens of their own.")
    weight = cast("Tensor | None", layer.in_proj_weight)
    if weight is None:
        if layer.kdim != layer.embed_dim or layer.vdim != layer.embed_dim:
            raise NotCoveredError("layer must be self-attention, got key or value features of another size.")
        parts = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        weight = torch.cat([cast("Tensor", part) for part in parts])
    features, heads, size = layer.embed_dim, layer.num_heads, layer.head_dim
    split = weight.detach().reshape(3, heads, size, features).mT
    bias = cast("Tensor | None", layer.in_proj_bias)
    key_bias, value_bias = (None, None) if bias is None else bias.detach().reshape(3, heads, size).split([2, 1])
    out = layer.out_proj.weight.detach().mT
    return Projections(split[:2], split[2:], out, key_bias, value_bias, _bias(layer.out_proj))


@projections.register(SimplicialAttention)
def _of_simplicial(layer: SimplicialAttention) -> Projections:
    as_stated(layer, SimplicialAttention)
    if layer.rope or layer.lower_orders:
        raise NotCoveredError("layer must have no rope or lower_orders: no theorem here is on them.")
    for part in (layer.key, layer.value, layer.out):
        as_stated(part, nn.Linear)
    features, heads, order = layer.features, layer.heads, layer.order
    keys = layer.key.weight.detach().reshape(order + 1, heads, -1, features).mT
    values = layer.value.weight.detach().reshape(order, heads, -1, features).mT
    # The layer makes its keys and values without a bias, but a linear map in their place may have one.
    key_bias, value_bias, out_bias = (_bias(part) for part in (layer.key, layer.value, layer.out))
    key_bias = None if key_bias is None else key_bias.reshape(order + 1, heads, -1)
    value_bias = None if value_bias is None else value_bias.reshape(order, heads, -1)
    tensors = keys, values, layer.out.weight.detach().mT, key_bias, value_bias, out_bias
    return Projections(*tensors, causal=layer.causal, window=layer.window, form=layer.form)


def _bias(layer: nn.Linear) -> Tensor | None:
    bias = cast("Tensor | None", layer.bias)
    return None if bias is None else bias.detach()


def tuple_products(factors: Sequence[Tensor]) -> Tensor:
    """Entrywise products over all tuples of rows, one of each factor: ``(heads, n, c), .. -> (heads, n^len, c)``."""
    return reduce(lambda a, b: (a[:, :, None] * b[:, None]).flatten(1, 2), factors)


def _cross(keys: Tensor) -> Tensor:
    """Vectors whose product with a query is the sum over chunks of the determinant of query and keys."""
    order, heads, tokens, channels = keys.shape
    chunks = channels // (order + 1)
    split = keys[..., : chunks * (order + 1)].unflatten(-1, (chunks, order + 1))
    picks = [split[m].reshape(heads, *[1] * m, tokens, *[1] * (order - 1 - m), chunks, order + 1) for m in range(order)]
    rows = torch.stack(torch.broadcast_tensors(*picks), -2).reshape(heads, tokens**order, chunks, order, order + 1)
    columns = torch.arange(order + 1, device=keys.device)
    minors = [(-1) ** c * torch.linalg.det(rows[..., columns != c]) for c in range(order + 1)]
    cross = torch.stack(minors, -1).flatten(-2)
    return torch.nn.functional.pad(cross, (0, channels - cross.shape[-1]))
