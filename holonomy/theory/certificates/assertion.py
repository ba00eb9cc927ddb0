"""The assertion of a Lipschitz bound for a test suite of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Float
from holonomy.models import Hypformer
from holonomy.theory.attention.projections import Projections, as_function
from holonomy.theory.certificates.attack import Attack, Scope, attack, attack_at
from holonomy.theory.certificates.certificate import features_of, known_ends, one_by_one
from holonomy.theory.certificates.regions import refuse_training, root, widened
from holonomy.theory.certificates.stretching import METRICS, Ends, Metric, ordinary

# How far out a search goes where hyperbolic space is at one end: to a rapidity at which float64 keeps nine digits. And
# how far in Euclidean space where no radius is given.
_FARTHEST, _LONGEST = 8.0, 30.0
_TOKENS = 3
# Pairs that climb together, and where a layer takes one input at a time.
_STARTS, _FEW_STARTS = 128, 16


class BoundViolatedError(AssertionError):
    """Two inputs that refute a Lipschitz bound.

    Args:
        bound: that was claimed.
        found: the pair, and by how much it is stretched.

    >>> BoundViolatedError(1.0, Attack(2.0, torch.zeros(1, 1), torch.ones(1, 1))).found.ratio
    2.0
    """

    def __init__(self, bound: float, found: Attack) -> None:
        self.bound = bound
        self.found = found
        times = found.ratio / bound if bound else math.inf
        super().__init__(
            f"bound must be at least {found.ratio:.6g}, by which the layer stretches the pair x, y; "
            f"got {bound:.6g}, {times:.4g} times too little.\nx = {found.x}\ny = {found.y}"
        )


@torch.inference_mode(mode=False)  # in which autograd keeps nothing, as without gradients
def assert_lipschitz(
    layer: Any,
    bound: float,
    *,
    radius: float | None = None,
    x: Float[Tensor, "tokens dim"] | None = None,
    tokens: int | None = None,
    features: int | None = None,
    metric: Metric | None = None,
    generator: torch.Generator | None = None,
) -> float:
    r"""Attack a claimed Lipschitz constant in its own scope, and fail where two inputs refute it.

    * Neither ``radius`` nor ``x``: any two inputs.
    * ``radius``: inputs whose tokens lie within it of the origin.
    * ``x`` and ``radius``: inputs whose tokens lie within it of those of ``x``.
    * ``x``: the stretch at that input.

    Distances are those of the manifolds that the layer names, Euclidean where it names none. The search is by sampling
    and ascent; finding nothing proves nothing. It is run in float64, on a copy of a layer that is not, and what
    rounding of inputs and results can have added is taken off each ratio: a bound that holds does not fail. It may if
    the layer loses digits inside, by casts to float32 or by differences of numbers much larger than its results: what
    it computes has steps, which stretch near points more than the formula does.

    Args:
        layer: a hyperbolic layer or model, or a function of ``(tokens, dim)``; attention as
            :func:`~holonomy.theory.lipschitz_bound` takes it. Layers that name manifolds take batches of inputs.
        bound: the claimed constant.
        radius: of the ball.
        x: one input; points ``(tokens, d + 1)`` where the layer starts on a manifold.
        tokens: of an input, where there is no ``x``; 3 if left out.
        features: d of the input, where neither ``x`` nor the layer tells.
        metric: of inputs of several tokens, ``"sup"`` or ``"l2"``; if left out that of
            :func:`~holonomy.theory.lipschitz_bound`, ``"sup"`` for hyperbolic layers and ``"l2"`` for others.
        generator: of the random numbers; seeded with 0 if left out, so that a test does the same each time.

    Returns:
        The largest ratio of distances after and before that was found: how much of the bound is used.

    Raises:
        BoundViolatedError: an ``AssertionError`` with the pair in its message, and as ``error.found``.
        NotCoveredError: if the layer drops entries at random.
        ValueError: if the bound is negative, the radius is not positive and finite, ``x`` has another shape, the number
            of features is not known, or the layer's result at the centre of the search is not finite.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(layer.weight)
    >>> round(assert_lipschitz(layer, 1.0), 4)
    1.0
    >>> assert_lipschitz(layer, 0.5, radius=2.0)
    Traceback (most recent call last):
    holonomy.theory.certificates.assertion.BoundViolatedError: bound must be at least 1, ...
    """
    checks.in_range("bound", bound, 0.0, math.inf)
    if radius is not None and not 0 < radius < math.inf:
        raise ValueError(f"radius must be positive and finite, or left out for all of space, got {radius}.")
    if x is not None and (x.ndim != 2 or x.shape[0] == 0):
        raise ValueError(f"x must have shape (tokens, dim), with one token at least, got {tuple(x.shape)}.")
    if tokens is not None:
        checks.positive_int("tokens", tokens)
    if isinstance(layer, nn.Module):
        refuse_training(layer)
    layer = layer.to(torch.float64) if isinstance(layer, Projections) else widened(layer)
    # Euclidean space at both where the layer names none.
    ends = known_ends(layer) or Ends(None, None)
    source = ends.source
    one_at_a_time = ends == Ends(None, None)
    flat = one_at_a_time and not isinstance(layer, Hypformer)
    metric = metric or ("l2" if flat else "sup")
    checks.one_of("metric", metric, METRICS)
    if x is None:
        size = (tokens or _TOKENS, _features(layer, features))
        space = torch.zeros(size, dtype=torch.float64, device=_device(layer))
    else:
        wide: Tensor = ordinary(x).detach().double()
        space = wide if source is None else source.space(wide)
    centre = space if source is None else source.lift(space)
    function = as_function(layer) if flat else layer
    with torch.no_grad():
        checks.finite("layer(x)", function(centre))
    if x is not None and radius is None:
        found = attack_at(function, Scope(ends, metric, centre, 0.0))
    else:
        farthest = _FARTHEST if source is None else _FARTHEST / root(source)
        reach = radius or _LONGEST if flat else min(radius or math.inf, farthest)
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        of_many, starts = _batched(function, centre) if one_at_a_time else (function, _STARTS)
        found = attack(of_many, Scope(ends, metric, centre, reach), generator, starts=starts)
    if found.refutes(bound):
        raise BoundViolatedError(bound, found)
    return found.ratio


def _batched(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Callable[[Tensor], Tensor], int]:
    """A function of one input as one of several, and how many pairs climb together."""
    together = torch.func.vmap(function)
    try:
        together(x[None])
    except RuntimeError:  # at a gradient written by hand, or at branches
        return one_by_one(function), _FEW_STARTS
    return together, _STARTS


def _features(layer: object, features: int | None) -> int:
    if features is not None:
        return checks.positive_int("features", features)
    if isinstance(layer, Projections):
        return layer.keys.shape[2]
    found = features_of(layer) if isinstance(layer, nn.Module) else None
    if found is None:
        raise ValueError("features must be given: the layer does not tell.")
    return found


def _device(layer: object) -> torch.device:
    if isinstance(layer, Projections):
        return layer.keys.device
    tensors = [*layer.parameters(), *layer.buffers()] if isinstance(layer, nn.Module) else []
    return tensors[0].device if tensors else torch.device("cpu")
