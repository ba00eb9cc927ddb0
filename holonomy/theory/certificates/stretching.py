r"""How much a map between hyperboloids stretches, at a point and at its worst over a ball.

**Lemma 0.** In space coordinates the metric of the hyperboloid of curvature :math:`-c` is
:math:`G(x) = I - c\, x_s x_s^\top / (c\, x_t^2)`, and the largest factor by which F stretches a tangent vector at x is

.. math:: \sigma_{\max}\big( G(F(x))^{1/2}\; DF_s(x)\; G(x)^{-1/2} \big), \qquad
    G^{1/2} = I - \frac{y y^\top}{y_t (1 + y_t)}, \quad G^{-1/2} = I + \frac{y y^\top}{1 + y_t}, \quad y = \sqrt c\, x .

Its supremum over a convex set is the Lipschitz constant of F there. Tokens form a product; ``"l2"`` measures a
configuration by the root of the sum of its tokens' squares, ``"sup"`` by the largest token.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from holonomy import checks, numerics
from holonomy._shapes import Float
from holonomy.layers import ExpMapHTC, HypMLR, HypPrototypes
from holonomy.manifolds import Lorentz

Metric = Literal["sup", "l2"]
"""How a configuration of tokens is measured: by its largest token, or by the root of the sum of squares."""

METRICS: tuple[Metric, ...] = ("sup", "l2")
_POWER_STEPS = 30


class Ends(NamedTuple):
    """Where a map starts and ends; ``None`` is Euclidean space."""

    source: Lorentz | None
    target: Lorentz | None


def ends_of(layer: object) -> Ends:
    """Read both ends off a layer: ``manifold_in`` and ``manifold_out``, or ``manifold`` for both."""
    source = getattr(layer, "manifold_in", getattr(layer, "manifold", None))
    target = getattr(layer, "manifold_out", source)
    if not isinstance(source, Lorentz) or not isinstance(target, Lorentz):
        raise TypeError(f"layer must name the manifolds it maps between, or ends be given; got {type(layer).__name__}.")
    if isinstance(layer, HypMLR | HypPrototypes):
        return Ends(source, None)
    return Ends(None if isinstance(layer, ExpMapHTC) else source, target)


def copied(layer: nn.Module) -> Any:
    """A copy, also where hooks keep computed weights, as those of pruning do: torch does not copy them."""
    computed = [value for part in layer.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    return deepcopy(layer, {id(value): value.detach().clone() for value in computed})


def ordinary(x: Any) -> Any:
    """A tensor or module that was made in inference mode as a copy that was not, of which derivatives can be taken."""
    if isinstance(x, nn.Module):
        return copied(x) if any(each.is_inference() for each in (*x.parameters(), *x.buffers())) else x
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x


# Without gradients no ascent climbs, and in inference mode autograd keeps nothing.
@torch.inference_mode(mode=False)
def stretch(
    layer: Callable[[Tensor], Tensor],
    x: Float[Tensor, "*batch ambient"],
    *,
    ends: Ends | None = None,
    joint: bool = False,
    metric: Metric = "l2",
) -> Float[Tensor, "..."]:
    r"""The factor by which a map stretches distances at a point, exactly.

    One backward pass for each coordinate of the output; the result carries no gradient. With ``joint`` the last two
    axes are one point, of the product of as many hyperboloids, and batch entries must not influence each other;
    without, tokens must not. In the ``"sup"`` metric of several tokens the value is the best that an alternating power
    iteration finds: a lower bound.

    Args:
        layer: any differentiable map of points.
        x: points ``(*batch, d + 1)``, or ``(*batch, n, d + 1)`` with ``joint``; vectors where the map starts in
            Euclidean space.
        ends: between which manifolds it maps; read off the layer if ``None``.
        joint: whether the tokens of a configuration influence each other.
        metric: ``"l2"`` or ``"sup"``, of configurations.

    Returns:
        Stretches, ``(*batch)``.

    >>> from holonomy.layers import HRC
    >>> m = Lorentz(-1.0, dtype=torch.float64)
    >>> x = m.lift(torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    >>> stretch(HRC(lambda s: 3 * s, m), x)  # of a dilation, across the ray: the lengths' ratio
    tensor([3.], dtype=torch.float64)
    """
    checks.one_of("metric", metric, METRICS)
    layer, x = ordinary(layer), ordinary(x)
    return top(differential(layer, x, Ends(*map(ordinary, ends or ends_of(layer))), joint=joint), metric)[0]


class _Germ(NamedTuple):
    """A map near a point: the space part it starts from, what comes out, and both in unit coordinates."""

    inside: Tensor
    outside: Tensor
    before: Tensor | None
    after: Tensor | None

    @staticmethod
    def of(layer: Callable[[Tensor], Tensor], x: Tensor, ends: Ends) -> _Germ:
        source, target = ends
        inside = x if source is None else source.space(x)
        inside = inside if inside.requires_grad else inside.detach().requires_grad_()
        # The fused kernels of scaled dot products have no second derivative.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            result = layer(inside if source is None else source.lift(inside))
            outside = result if target is None else target.space(result)
        before = None if source is None else _unit(inside, source)
        return _Germ(inside, outside, before, None if target is None else _unit(outside, target))

    def pull(self, covector: Tensor, *, create_graph: bool) -> Tensor:
        """The differential's transpose in orthonormal frames, applied to ``(..., d_out)``."""
        # In space coordinates y the metric is I - y y^T / t^2, and E = I + y y^T / (1 + t) is an orthonormal frame. The
        # transpose is E_in^T J^T E_out^-T, with E^-1 = I - y y^T / (t (1 + t)).
        if self.after is not None:
            time = unit_time(self.after)
            covector = covector - (covector * self.after).sum(-1, keepdim=True) * self.after / (time * (1 + time))
        (slope,) = torch.autograd.grad(
            self.outside, self.inside, covector, retain_graph=True, create_graph=create_graph
        )
        if self.before is None:
            return slope
        return slope + (slope * self.before).sum(-1, keepdim=True) * self.before / (1 + unit_time(self.before))


def differential(
    layer: Callable[[Tensor], Tensor], x: Tensor, ends: Ends, *, joint: bool = False
) -> Float[Tensor, "..."]:
    """The differential between orthonormal frames, ``(*batch, n_out, d_out, n_in, d_in)``; n = 1 unless joint."""
    germ = _Germ.of(layer, x, ends)
    axes = germ.outside.shape[-2:] if joint else germ.outside.shape[-1:]
    basis = torch.eye(axes.numel(), dtype=germ.outside.dtype, device=germ.outside.device).unflatten(-1, axes)
    rows = [germ.pull(unit.expand_as(germ.outside), create_graph=False) for unit in basis]
    # (*batch, outputs, [n,] d): outputs stand before the tokens that they depend on.
    matrix = torch.stack(rows, -3 if joint else -2)
    matrix = matrix if joint else matrix.unsqueeze(-2)
    return matrix.unflatten(-3, axes if joint else (1, *axes)).detach()


def top(matrix: Tensor, metric: Metric) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of a differential, infinite if that is not finite, and unit directions ``(*batch, n, d)`` out and in."""
    finite = matrix.isfinite().flatten(-4).all(-1)
    size, *directions = _top(torch.where(finite[..., None, None, None, None], matrix, 0.0), metric)
    return size.masked_fill(~finite, torch.inf), directions[0], directions[1]


def _top(matrix: Tensor, metric: Metric) -> tuple[Tensor, Tensor, Tensor]:
    if metric == "l2" or matrix.shape[-2] == 1:
        u, s, vh = torch.linalg.svd(matrix.flatten(-2).flatten(-3, -2), full_matrices=False)
        return s[..., 0], u[..., 0].unflatten(-1, matrix.shape[-4:-2]), vh[..., 0, :].unflatten(-1, matrix.shape[-2:])
    # The largest |sum_j D_ij v_j| over unit v_j: alternate between the v_j and the direction of the sum, for every i,
    # from the top right singular vector of each row of blocks.
    v = torch.linalg.svd(matrix.flatten(-2), full_matrices=False).Vh[..., 0, :].unflatten(-1, matrix.shape[-2:])
    for _ in range(_POWER_STEPS):
        v = numerics.unit_vector(v)
        u = (matrix * v[..., None, :, :]).sum((-2, -1))
        v = (matrix * u[..., None, None]).sum(-3)
    v = numerics.unit_vector(v)
    u = (matrix * v[..., None, :, :]).sum((-2, -1))
    # The sup metric takes the largest row: directions of that row only.
    size, token = numerics.norm(u).max(-1, keepdim=True)
    chosen = torch.zeros_like(u).scatter(-2, token[..., None].expand_as(u[..., :1, :]), 1.0)
    u = numerics.unit_vector(u) * chosen
    v = torch.take_along_dim(v, token[..., None, None], -3).squeeze(-3)
    return size.squeeze(-1), u, v


def _unit(space: Tensor, manifold: Lorentz) -> Tensor:
    return space * manifold.curvature.detach().to(space.dtype).neg().sqrt()


def unit_time(y: Tensor) -> Tensor:
    """The time of points with these space parts, in unit coordinates."""
    return (1 + y.square().sum(-1, keepdim=True)).sqrt()


def points_in_ball(
    count: int, shape: tuple[int, ...], radius: float, generator: torch.Generator | None = None
) -> Float[Tensor, "..."]:
    """Draw tangent vectors at the origin, lengths uniform up to the radius, half of them on the sphere itself."""
    drawn = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    length = torch.rand(count, *shape[:-1], 1, generator=generator, dtype=torch.float64)
    length = torch.where(torch.arange(count).reshape(-1, *[1] * len(shape)) % 2 == 0, 1.0, length)
    return radius * length * drawn / numerics.positive(drawn.norm(dim=-1, keepdim=True))


@torch.inference_mode(mode=False)
def measure_stretch(
    layer: nn.Module | Callable[[Tensor], Tensor],
    radius: float,
    features: int,
    *,
    tokens: int | None = None,
    ends: Ends | None = None,
    metric: Metric = "l2",
    starts: int = 16,
    steps: int = 60,
    generator: torch.Generator | None = None,
    like: Tensor | None = None,
) -> float:
    r"""The largest stretch that an ascent finds over the ball about the origin: a lower bound, never a certificate.

    All starts climb together along the gradient of the stretch, in the tangent space at the origin, with steps that
    shrink from a third of the radius to a ten-thousandth; points that leave the ball are pulled back along their rays.
    It costs ``steps`` times the backward passes of :func:`stretch` and one through each of them.

    Args:
        layer: any twice differentiable map of points.
        radius: of the ball, in the distance where the map starts.
        features: d, of the input.
        tokens: tokens of a configuration; ``None`` if the map takes each point by itself.
        ends: as in :func:`stretch`.
        metric: as in :func:`stretch`.
        starts: how many points climb.
        steps: of each.
        generator: draws the starts.
        like: whose dtype and device the points get; those of the layer's parameters or manifolds if ``None``.

    Returns:
        The largest stretch seen.

    Raises:
        ValueError: if the radius is not positive and finite, or there are no features or starts.

    >>> from holonomy.layers import HRC
    >>> m = Lorentz(-1.0, dtype=torch.float64)
    >>> round(measure_stretch(HRC(lambda s: 0.5 * s, m), 1.0, 2), 4)
    0.6652
    """
    checks.positive("radius", radius)
    checks.positive_int("features", features)
    checks.positive_int("starts", starts)
    checks.nonnegative_int("steps", steps)
    checks.generator(generator)
    layer = ordinary(layer)
    ends = Ends(*map(ordinary, ends or ends_of(layer)))
    u = points_in_ball(starts, (features,) if tokens is None else (tokens, features), radius, generator)
    u = u.to(_like(layer, ends) if like is None else like)
    best = 0.0
    for step in range(steps + 1):
        u = u.detach().requires_grad_()
        x = u if ends.source is None else ends.source.expmap0(nn.functional.pad(u, (1, 0)))
        value, out, back = top(differential(layer, x.detach(), ends, joint=tokens is not None), metric)
        # Where the differential is not finite there is no stretch to show.
        best = max(best, float(value.nan_to_num(0.0, 0.0, 0.0).amax()))
        if step == steps:
            break
        # At fixed directions the stretch is a number whose gradient is that of the maximum.
        germ = _Germ.of(layer, x, ends)
        pulled = germ.pull(out if tokens else out.squeeze(-2), create_graph=True)
        moved = (pulled * (back if tokens else back.squeeze(-2))).sum()
        (slope,) = torch.autograd.grad(moved, u, allow_unused=True) if moved.requires_grad else (None,)
        if slope is None:  # a linear map of Euclidean space: its stretch is the same everywhere
            break
        slope = _inward(slope.nan_to_num(0.0), u.detach(), radius)
        scale = numerics.positive(slope.flatten(1).norm(dim=1)).reshape(-1, *[1] * (u.ndim - 1))
        reach = radius * 3.0 ** (-1 - 7 * step / steps) * (tokens or 1) ** 0.5
        u = numerics.within(u.detach() + reach * slope / scale, radius)
    return best


def _inward(slope: Tensor, u: Tensor, radius: float) -> Tensor:
    """The gradient without what would only push points on the sphere against it."""
    length = numerics.norm(u, keepdim=True)
    ray = numerics.safe_div(u, length)
    outward = (slope * ray).sum(-1, keepdim=True).clamp(min=0)
    return slope - torch.where(length >= radius * (1 - numerics.CHECK_TOLERANCE), outward, 0.0) * ray


def _like(layer: object, ends: Ends) -> Tensor:
    known = [*layer.parameters()] if isinstance(layer, nn.Module) else []
    known += [end.curvature for end in ends if end is not None]
    return known[0] if known else torch.zeros(1, dtype=torch.float64)
