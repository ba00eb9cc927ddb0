r"""How much a layer does stretch: the largest singular value of its Jacobian, and its largest value over a ball.

Both are lower bounds of what they look for, never certificates. One step of the iteration is a forward-mode and a
reverse-mode product with the Jacobian, about five evaluations of the layer; nothing of size (n d)^2 is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import checks, numerics
from holonomy._shapes import Bool, Float
from holonomy.theory.attention.projections import Projections, as_function


class Measured(NamedTuple):
    """The largest stretch that was found."""

    value: float  # the stretch
    x: Tensor  # the input where it was found, (n, d)
    products: int  # how many products with a Jacobian it took, forward or reverse


_Linear = Callable[[Tensor], Tensor]


def _linear(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[_Linear, _Linear]:
    """A function's derivative at a point, and its transpose."""
    cotangent = torch.func.vjp(function, x)[1]
    return lambda v: torch.func.jvp(function, (x,), (v,))[1], lambda u: cotangent(u)[0]


def jacobian_norm(
    function: Callable[[Tensor], Tensor],
    x: Float[Tensor, "..."],
    *,
    start: Float[Tensor, "..."] | None = None,
    steps: int = 100,
) -> tuple[float, Tensor]:
    """Find the largest singular value of a Jacobian by Lanczos' iteration: exact after as many steps as unknowns."""
    push, pull = _linear(function, x)
    if start is None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    # A little of everything: a warm start may be orthogonal to where the largest value went.
    v = start / numerics.positive(start.norm())
    basis: list[Tensor] = []
    images: list[Tensor] = []
    floor = torch.finfo(x.dtype).eps
    for _ in range(min(steps, x.numel())):
        basis.append(v)
        images.append(push(v))
        # The next direction is J^T J v, made orthogonal to all before it.
        w = pull(images[-1])
        size = w.norm()
        stacked = torch.stack(basis).flatten(1)
        for _ in range(2):  # twice is enough (Kahan)
            w = w - (stacked.mT @ (stacked @ w.flatten())).reshape(w.shape)
        if not w.norm() > 10 * floor * size:
            break
        v = w / w.norm()
    # Largest stretch within the span of the directions tried: the singular values of J on an orthonormal basis.
    _, values, right = torch.linalg.svd(torch.stack(images).flatten(1).mT, full_matrices=False)
    return values[0].item(), torch.tensordot(right[0], torch.stack(basis), 1)


def measure_lipschitz(
    layer: Any,
    radius: float,
    tokens: int,
    *,
    features: int | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    starts: int = 8,
    ascend: int = 3,
    steps: int = 60,
    seed: int = 0,
) -> Measured:
    r"""Search the ball for the input that a layer stretches most: a lower bound of its Lipschitz constant.

    Starts are two-point configurations, one token against the others and half against half, at plus and minus R or at
    R and a part of it on one line, and random ones: random starts alone stay two to four times too low. The best
    ``ascend`` of them climb: the gradient of :math:`\langle u, J(X) v \rangle` by reverse over forward, rows put back
    into the ball, u and v kept warm. Cost: about ``20 starts + 14 ascend steps`` evaluations of the layer, and 500 for
    each final value.

    Args:
        layer: what :func:`holonomy.theory.attention.projections.as_function` takes.
        radius: R: every token within this distance of the origin.
        tokens: n.
        features: d, where the layer does not tell.
        mask: ``(n, ..., n)``, ``True`` at simplexes that count.
        starts: random starts, beside as many configurations on lines.
        ascend: how many of them climb.
        steps: of each climb.
        seed: of the starts.

    Returns:
        The stretch, where it was found, and what it took.

    Raises:
        TypeError: if the layer is none, or an argument is no number of its kind.
        ValueError: if the radius is negative or infinite, or there are no tokens, features or starts.

    >>> layer = torch.nn.MultiheadAttention(4, 2).double()
    >>> from holonomy.theory.attention.lipschitz import lipschitz_bound
    >>> measure_lipschitz(layer, 1.0, 3).value <= lipschitz_bound(layer, 1.0, tokens=3)
    True
    """
    checks.nonnegative("radius", radius)
    for name, count in (("tokens", tokens), ("starts", starts), ("ascend", ascend)):
        checks.positive_int(name, count)
    checks.nonnegative_int("steps", steps)
    checks.nonnegative_int("seed", seed)
    if features is not None:
        checks.positive_int("features", features)
    function = as_function(layer, mask)
    like, size = _like(layer, features)
    generator = torch.Generator().manual_seed(seed)
    candidates = [x.to(like) for x in _starts(tokens, size, radius, starts, generator)]
    found = [(*jacobian_norm(function, x, steps=4), x) for x in candidates]
    found.sort(key=lambda entry: entry[0], reverse=True)
    products = 8 * len(found)
    best = Measured(-1.0, candidates[0], 0)
    for _, direction, start in found[:ascend]:
        for x, v in (_climb(function, start, direction, radius, steps), (start, direction)):
            value, _ = jacobian_norm(function, x, start=v)
            if value > best.value:
                best = Measured(value, x, 0)
        products += 5 * steps + 400
    return best._replace(products=products)


def _like(layer: Any, features: int | None) -> tuple[Tensor, int]:
    """A tensor of the layer's dtype and device, and its number of features."""
    if isinstance(layer, Projections):
        like, told = layer.keys, layer.keys.shape[2]
    else:
        parameters = list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []
        like = parameters[0].detach() if parameters else torch.zeros((), dtype=torch.float64)
        told = getattr(layer, "embed_dim", getattr(layer, "features", None))
    size = told if features is None else features
    if size is None:
        raise ValueError("features must be given: the layer does not tell.")
    if told not in (None, size):
        raise ValueError(f"features must be those of the layer, {told}, got {size}.")
    return like, size


def _starts(tokens: int, size: int, radius: float, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    for index in range(count):
        if index < size:
            line = torch.eye(size, dtype=torch.float64)[index]
        else:
            line = torch.randn(size, generator=generator, dtype=torch.float64)
            line = line / line.norm()
        sign = torch.ones(tokens, dtype=torch.float64)
        alone = index % 2 == 0
        sign[1 if alone else tokens // 2 :] = -1.0 if index % 4 < 2 else 0.5
        yield radius * sign[:, None] * line
    for index in range(count):
        x = torch.randn(tokens, size, generator=generator, dtype=torch.float64)
        x = x / x.norm(dim=1, keepdim=True) * radius
        yield x if index % 2 else x * torch.rand(tokens, 1, generator=generator, dtype=torch.float64)


def _climb(
    function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, radius: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Ascend the stretch; the best input on the way and its direction."""

    def stretch(point: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return (u * torch.func.jvp(function, (point,), (v,))[1]).sum()

    slope = torch.func.grad_and_value(stretch)
    best, best_x, best_v = -1.0, x, v
    for step in range(steps):
        push, pull = _linear(function, x)
        # One step of power iteration keeps u and v near the top singular vectors as x moves.
        u = push(v)
        u = u / numerics.positive(u.norm())
        v = pull(u)
        v = v / numerics.positive(v.norm())
        gradient, value = slope(x, u, v)
        if value.item() > best:
            best, best_x, best_v = value.item(), x, v
        rate = 0.3 * radius * (1 - step / steps)
        longest = numerics.positive(gradient.norm(dim=1).amax())
        x = numerics.within(x + rate * gradient / longest, radius)
    return best_x, best_v
