"""Our manifold functions against the oracle, row by row: values and every gradient.

An error is norm-wise per row, |ours - oracle| / |oracle|. A point is compared in its space part and
in its time apart, because time would drown the space part near the origin. Where the true answer is
beyond the dtype, ours has to be finite and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from mpmath import mp, mpf, sqrt
from torch import Tensor
from torch.nn.functional import pad

from holonomy.layers.hyperbolic.midpoint import lifted_midpoint
from holonomy.manifolds import Lorentz, busemann, hyperboloid
from tests.manifolds.geometry import Pair, pairs, rapidity
from tests.reference import manifold as oracle

KAPPAS = (-0.01, -1.0, -100.0)
DIMS = (1, 2, 3, 16)


@dataclass(frozen=True)
class Operation:
    """One function of the manifold: how it is called, on what, and its oracle.

    Attributes:
        call: Our function, from the manifold and ambient arguments.
        reference: The oracle, from space parts and kappa.
        arguments: What of a `Pair` goes in: "x", "y", "towards", "other" (tangent at x) or
            "free" (``towards``, taken as a tangent vector at the origin).
        result: "scalar", "point" (space and time compared apart), "tangent" or "ball".
        base: Of a tangent vector, where it is one: an argument, or "" for the origin.
        fits: Whether a row is in its domain.
        roundings: Of each coordinate of a gradient in float32, left out where errors are taken in the metric.
    """

    call: Callable[..., Tensor]
    reference: oracle.Oracle
    arguments: tuple[str, ...]
    result: str
    base: str = ""
    fits: Callable[[Pair], bool] = lambda row: True
    roundings: int = 1


def apart(row: Pair) -> bool:
    """Whether two points and the origin lie on no line, on which angles have no derivative."""
    x, y = (torch.nn.functional.normalize(z.double(), dim=0, eps=0.0) for z in (row.x, row.y))
    return bool(1 - (x @ y).square() > 1e-13)


OPERATIONS = {
    "dist": Operation(lambda m, x, y: m.dist(x, y), oracle.dist, ("x", "y"), "scalar"),
    "cdist": Operation(lambda m, x, y: m.cdist(x[:, None], y[:, None]).flatten(), oracle.dist, ("x", "y"), "scalar"),
    "dist0": Operation(lambda m, x: m.dist0(x), oracle.dist0, ("y",), "scalar"),
    "expmap": Operation(lambda m, x, u: m.expmap(x, u), oracle.expmap, ("x", "towards"), "point"),
    "logmap": Operation(lambda m, x, y: m.logmap(x, y), oracle.logmap, ("x", "y"), "tangent", "x"),
    "expmap0": Operation(lambda m, u: m.expmap0(u), oracle.expmap0, ("free",), "point"),
    "logmap0": Operation(lambda m, y: m.logmap0(y), oracle.logmap0, ("y",), "tangent"),
    "transp": Operation(lambda m, x, y, v: m.transp(x, y, v), oracle.transp, ("x", "y", "other"), "tangent", "y"),
    "inner": Operation(lambda m, x, u, v: m.inner(x, u, v), oracle.inner_at, ("x", "towards", "other"), "scalar"),
    "transp0back": Operation(lambda m, x, v: m.transp0back(x, v), oracle.transp0back, ("x", "towards"), "tangent"),
    "midpoint": Operation(
        lambda m, x, y: lifted_midpoint(x, y, 1.0, m.curvature), oracle.midpoint, ("x", "y"), "point"
    ),
    "transp0": Operation(lambda m, y, v: m.transp0(y, v), oracle.transp0, ("y", "free"), "tangent", "y"),
    "rescale": Operation(lambda m, y: m.rescale(y, Lorentz(-4.0, dtype=y.dtype)), oracle.rescale, ("y",), "point"),
    "logmap_frame": Operation(
        lambda m, x, y: pad(hyperboloid.logmap_frame(x, y, m.curvature), (1, 0)),
        oracle.logmap_frame,
        ("x", "y"),
        "tangent",
    ),
    "expmap_frame": Operation(
        lambda m, x, v: hyperboloid.expmap_frame(x, v[..., 1:], m.curvature),
        oracle.expmap_frame,
        ("x", "free"),
        "point",
    ),
    "ray_angle": Operation(
        lambda m, x, y: hyperboloid.ray_angle(x, y, m.curvature),
        oracle.ray_angle,
        ("x", "y"),
        "scalar",
        fits=apart,
    ),
    "busemann": Operation(
        lambda m, y, u: busemann(y, u[..., 1:], m),
        oracle.busemann,
        ("y", "other"),
        "scalar",
        fits=lambda row: bool(row.other.any()),
    ),
    "busemann behind": Operation(
        lambda m, y, u: busemann(y, -u[..., 1:], m),
        lambda y, u, kappa: oracle.busemann(y, [-value for value in u], kappa),
        ("y", "other"),
        "scalar",
        fits=lambda row: bool(row.other.any()),
    ),
    "to_poincare": Operation(lambda m, y: m.to_poincare(y), oracle.to_poincare, ("y",), "ball"),
    "to_klein": Operation(lambda m, y: m.to_klein(y), oracle.to_klein, ("y",), "ball"),
}


def midpoint_row_by_row(manifold: Lorentz, x: Tensor, y: Tensor) -> Tensor:
    """Return the midpoints with 0.3 y of one row at a time: most are computed in float32, those on one ray not."""
    rows = zip(x.split(1), y.split(1), strict=True)
    return torch.cat([lifted_midpoint(*row, 0.3, manifold.curvature) for row in rows])


def weighted_midpoint(x: oracle.Vector, y: oracle.Vector, kappa: mpf) -> oracle.Vector:
    """Return the midpoint of x and 0.3 y."""
    return oracle.centroid(x, y, [mpf(1), mpf(0.3)], kappa)


OPERATIONS["midpoint row by row"] = Operation(midpoint_row_by_row, weighted_midpoint, ("x", "y"), "point", roundings=3)


class Error(NamedTuple):
    """One comparison: which quantity, of which row, its relative error (infinite if not finite)."""

    quantity: str
    row: str
    error: float


def relative(ours: Tensor, truth: oracle.Vector, *, scale: mpf | None = None, judged: bool = True) -> float:
    """Return |ours - truth| / |truth|, or 0 for any finite answer where the truth overflows."""
    if not bool(torch.isfinite(ours).all()):
        return float("inf")
    limits = torch.finfo(ours.dtype)
    size = sqrt(oracle.dot(truth, truth))
    # A point saturates at a quarter of the largest number, so that its time fits too.
    if size > limits.max / 8 or not judged:
        return 0.0
    numbers = oracle.exact(ours.flatten().tolist())
    away = [a - b for a, b in zip(numbers, truth, strict=True)]
    # The oracle's differences leave 1e-60 or so of a derivative that is zero.
    floor = max(limits.tiny, 1e-50)
    return float(sqrt(oracle.dot(away, away)) / (max(size, scale or mpf(0)) + floor))


def stray(
    ours: Tensor, truth: oracle.Vector, at: oracle.Vector, kappa: mpf, *, dual: bool = False, roundings: int = 1
) -> float:
    """Return |ours - truth| / |truth| in the metric at a point, a rounding of each coordinate left out, or more.

    Both are space parts of tangent vectors, or ``dual``, gradients by space parts. Where the metric stretches, the
    nearest numbers that the dtype has may be far away: what remains is what the function itself loses.
    """
    if not bool(torch.isfinite(ours).all()):
        return float("inf")
    spacing = roundings * torch.finfo(ours.dtype).eps
    radius, root = sqrt(oracle.dot(at, at)), sqrt(-kappa)
    time = sqrt(1 + (root * radius) ** 2)

    def length(vector: oracle.Vector) -> mpf:
        along = oracle.dot(at, vector) / radius if radius else mpf(0)
        return sqrt(abs(oracle.dot(vector, vector) - along**2) + (along * time if dual else along / time) ** 2)

    away = [a - b for a, b in zip(oracle.exact(ours.tolist()), truth, strict=True)]
    left = [mp.sign(a) * max(mpf(0), abs(a) - spacing * abs(b)) for a, b in zip(away, truth, strict=True)]
    # The oracle's differences leave 1e-60 or so of a derivative that is zero.
    return float(length(left) / (length(truth) + max(torch.finfo(ours.dtype).tiny * time, 1e-50)))


def within_reach(name: str, dtype: torch.dtype, kappa: float, row: Pair) -> tuple[bool, bool]:
    """Return whether the values, and the gradients, of a row are judged or have to be finite only.

    Float64 has nothing wider to compute in, and loses exp(2 r) of its digits at rapidity r. The
    gradients of the exponential map are differences of terms exp(2 r) times larger: float64 holds their
    digits to rapidity 44, not to where float32 ends. In a ball,
    the coordinate itself has lost them where the gradient has not: float32 ends there at rapidity 17.
    """
    reach = max(rapidity(row.x, kappa), rapidity(row.y, kappa))
    if dtype == torch.float64:
        return reach < 10, reach < 6
    gradients = {"expmap": 44.0, "to_poincare": 12.0, "to_klein": 9.0}
    return True, reach < gradients.get(name, float("inf"))


def curvature_of(manifold: Lorentz) -> tuple[Tensor, float]:
    """Return the curvature's parameter and d kappa / d parameter."""
    (parameter,) = [p for p in manifold.parameters() if p.requires_grad]
    (slope,) = torch.autograd.grad(manifold.curvature.sum(), parameter)
    return parameter, float(slope.sum())


def ambient(manifold: Lorentz, row: Pair, name: str) -> Tensor:
    """Return the named argument of a pair as ambient coordinates, time computed in float64."""
    kappa = float(manifold.curvature.detach())
    x = row.x.double()
    space = {"x": row.x, "y": row.y, "other": row.other}.get(name, row.towards)
    wide = space.double()
    if name == "free":
        time = wide.new_zeros(1)
    elif name in ("x", "y"):
        time = torch.hypot(wide.norm(), wide.new_tensor(abs(kappa) ** -0.5)).reshape(1)
    else:
        time = (x @ wide / torch.hypot(x.norm(), x.new_tensor(abs(kappa) ** -0.5))).reshape(1)
    limit = torch.finfo(space.dtype).max
    return torch.cat([time.clamp(-limit, limit).to(space.dtype), space])


def curvature_scale(
    slope: float, kappa: mpf, weights: oracle.Vector, terms: oracle.Vector, truth: oracle.Vector
) -> mpf:
    """Return the size that a derivative in curvature is judged against where it is smaller itself.

    A sum of coordinates can cancel where no coordinate is wrong. And far out, or where points nearly
    coincide, the derivative vanishes like exp(-2 r) beside value / kappa: a millionth of that will do.
    """
    values = [w * t / kappa for w, t in zip(weights, truth, strict=True)]
    return abs(slope) * max(sqrt(oracle.dot(terms, terms)), sqrt(oracle.dot(values, values)) / 10**6)


def point_scale(name: str, spaces: list[oracle.Vector], kappa: mpf) -> mpf:
    """Return the size, per unit of cotangent, that a gradient is judged against where it is smaller.

    That of transport is a curvature times an area, and vanishes by structure (in one dimension, at
    x = y) beside the vector that is carried, as long as it is at y. That of the exponential map vanishes
    in its time where u leads from x to within rounding of the origin. A billionth of what cancels is far
    beyond float32.
    """
    lengths = [sqrt(oracle.dot(space, space)) for space in spaces]
    root = sqrt(-kappa)
    sizes = {
        "transp": lambda: lengths[2] * root * sqrt(1 + (root * lengths[1]) ** 2),
        "expmap": lambda: min(1, lengths[0] * root),
        "expmap_frame": lambda: min(1, lengths[0] * root),
        # In one dimension no direction can change.
        "busemann": lambda: 1 / (lengths[1] * root),
        "busemann behind": lambda: 1 / (lengths[1] * root),
    }
    return sizes[name]() / 10**9 if name in sizes else mpf(0)


def cotangents(operation: Operation, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the cotangents to pull back, by the name of the part of the output they weigh."""
    generator = torch.Generator().manual_seed(width)
    draw = torch.empty(width, dtype=torch.float64).uniform_(0.5, 1.5, generator=generator)
    signs = torch.randint(0, 2, (width,), generator=generator) * 2 - 1
    both = (draw * signs).to(dtype)
    if operation.result != "point":
        return {"": both}
    time = torch.cat([both[:1], torch.zeros_like(both[1:])])
    return {".space": both - time, ".time": time}


def compare(name: str, kappa: float, rows: Sequence[Pair]) -> Iterator[Error]:
    """Compare one function on rows of one dimension: its values in one batch, and all gradients."""
    operation = OPERATIONS[name]
    rows = [row for row in rows if operation.fits(row)]
    if not rows:
        return
    dtype = rows[0].x.dtype
    manifold = Lorentz(kappa, learnable=True, dtype=dtype)
    parameter, slope = curvature_of(manifold)
    exact_kappa = mpf(float(manifold.curvature.detach()))
    inputs = [
        torch.stack([ambient(manifold, row, argument) for row in rows]).requires_grad_()
        for argument in operation.arguments
    ]
    output = operation.call(manifold, *inputs)
    assert output.dtype == dtype
    flat = output.reshape(len(rows), -1)
    weights = cotangents(operation, flat.shape[1], dtype)
    pulled = {
        part: torch.autograd.grad(flat, inputs, weight.expand_as(flat), retain_graph=True)
        for part, weight in weights.items()
    }
    for index, row in enumerate(rows):
        judged, judged_gradients = within_reach(name, dtype, kappa, row)
        spaces = [oracle.exact(x[index, 1:].tolist()) for x in inputs]
        with oracle.working(*spaces, kappa=exact_kappa):
            truth = operation.reference(*spaces, exact_kappa)
            # Where the value saturates, its gradient is that of the saturated value: finite.
            size = sqrt(oracle.dot(truth, truth))
            judged_gradients = judged_gradients and size < torch.finfo(dtype).max / 8
            if operation.result == "point":
                parts = {".space": (flat[index, 1:], truth[1:]), ".time": (flat[index, :1], truth[:1])}
            else:
                parts = {"": (flat[index], truth)}
            floor = point_scale(name, spaces, exact_kappa)
            for part, (ours, want) in parts.items():
                reached = floor / sqrt(-exact_kappa) if operation.result == "point" else None
                found = relative(ours, want, judged=judged, scale=reached)
                yield Error(f"{name}{part}", row.label, found)
            x, origin = oracle.exact(row.x.tolist()), [mpf(0)] * len(row.x)
            places = {"x": x, "y": oracle.exact(row.y.tolist()), "towards": x, "other": x}
            if judged and size < torch.finfo(dtype).max / 8 and operation.result == "tangent":
                found = stray(flat[index, 1:], truth[1:], places.get(operation.base, origin), exact_kappa)
                yield Error(f"{name} in the metric", row.label, found)
            slopes = oracle.jacobian(operation.reference, spaces, exact_kappa)
            for part, weight in weights.items():
                weigh = oracle.exact(weight.tolist())
                for place, argument in enumerate(operation.arguments):
                    ours = pulled[part][place][index]
                    assert ours[0] == 0, f"{name}: gradient in the time of {argument}, {row.label}"
                    want = [oracle.dot(weigh, column) for column in slopes[place]]
                    found = relative(
                        ours[1:], want, judged=judged_gradients, scale=floor * sqrt(oracle.dot(weigh, weigh))
                    )
                    yield Error(f"{name}{part} d{argument}", row.label, found)
                    # A time can stand still where every space coordinate moves.
                    moves = part != ".time"
                    # A direction is no vector at a point.
                    moves = moves and not (name.startswith("busemann") and argument == "other")
                    if judged_gradients and moves and sqrt(oracle.dot(want, want)) < torch.finfo(dtype).max / 8:
                        at = places.get(argument, origin)
                        found = stray(ours[1:], want, at, exact_kappa, dual=True, roundings=operation.roundings)
                        yield Error(f"{name}{part} d{argument} in the metric", row.label, found)
                (ours,) = torch.autograd.grad(flat[index], parameter, weight, retain_graph=True, allow_unused=True)
                ours = torch.zeros_like(parameter) if ours is None else ours
                terms = [w * s for w, s in zip(weigh, slopes[-1][0], strict=True)]
                want = [mpf(slope) * mp.fsum(terms)]
                scale = curvature_scale(slope, exact_kappa, weigh, terms, truth)
                # Torch hands the derivative in kappa itself on in the curvature's dtype, and each use of it saturates.
                fits = abs(want[0]) < torch.finfo(dtype).max / 1024 * min(1.0, abs(kappa))
                found = relative(ours, want, scale=scale, judged=judged_gradients and fits)
                yield Error(f"{name}{part} dkappa", row.label, found)


def errors(
    name: str, kappa: float, dtype: torch.dtype, *, dims: Sequence[int] = DIMS, thin: int = 1
) -> Iterator[Error]:
    """Compare one function at one curvature over the grid of pairs of every dimension."""
    for dim in dims:
        yield from compare(name, kappa, list(pairs(kappa, dim, dtype, thin=thin * (dim // 8 * 3 + 1))))


def within_float64(rows: Iterable[Pair], kappa: float, dtype: torch.dtype) -> list[Pair]:
    """Return the rows whose points and gradients are judged in this dtype."""
    return [row for row in rows if within_reach("", dtype, kappa, row)[1]]


def matrix_rows(kappa: float, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
    """Return two small sets of space parts, some of them shared, near the origin and far out."""
    rows = within_float64(pairs(kappa, dim, dtype, thin=97), kappa, dtype)
    xs, ys = torch.stack([row.x for row in rows]), torch.stack([row.y for row in rows])
    return xs[:: len(xs) // 9], torch.cat([ys[:: len(ys) // 7], xs[: len(xs) : len(xs) // 2]])


def cdist_errors(kappa: float, dtype: torch.dtype, *, dims: Sequence[int] = (1, 3)) -> Iterator[Error]:
    """Compare the matrix of distances, and the gradient of one weighted sum of it."""
    for dim in dims:
        manifold = Lorentz(kappa, learnable=True, dtype=dtype)
        parameter, slope = curvature_of(manifold)
        exact_kappa = mpf(float(manifold.curvature.detach()))
        spaces = matrix_rows(kappa, dtype, dim)
        x, y = (manifold.lift(space).detach().requires_grad_() for space in spaces)
        output = manifold.cdist(x, y)
        weight = torch.rand(output.shape, generator=torch.Generator().manual_seed(dim)).to(dtype)
        gradients = torch.autograd.grad(output, [x, y, parameter], weight)
        want_x = [[mpf(0)] * dim for _ in x]
        want_y = [[mpf(0)] * dim for _ in y]
        want_kappa = mpf(0)
        for i, one in enumerate(oracle.exact(row) for row in spaces[0].tolist()):
            for j, other in enumerate(oracle.exact(row) for row in spaces[1].tolist()):
                with oracle.working(one, other, kappa=exact_kappa):
                    truth = oracle.dist(one, other, exact_kappa)
                    yield Error("cdist", f"{i},{j} dim={dim}", relative(output[i, j], truth))
                    if one == other:  # the subgradient zero
                        continue
                    dx, dy, dkappa = oracle.jacobian(oracle.dist, [one, other], exact_kappa)
                w = mpf(float(weight[i, j]))
                want_x[i] = [a + w * b[0] for a, b in zip(want_x[i], dx, strict=True)]
                want_y[j] = [a + w * b[0] for a, b in zip(want_y[j], dy, strict=True)]
                want_kappa += w * dkappa[0][0] * slope
        for i, want in enumerate(want_x):
            yield Error("cdist dx", f"{i} dim={dim}", relative(gradients[0][i, 1:], want))
        for j, want in enumerate(want_y):
            yield Error("cdist dy", f"{j} dim={dim}", relative(gradients[1][j, 1:], want))
        yield Error("cdist dkappa", f"dim={dim}", relative(gradients[2], [want_kappa]))


def clusters(kappa: float, dtype: torch.dtype, dim: int) -> Iterator[tuple[str, Tensor]]:
    """Yield sets of points to average: everywhere at once, near one another far out, antipodal, on one ray."""
    rows = within_float64(pairs(kappa, dim, dtype, thin=37), kappa, dtype)
    for start in range(0, len(rows) - 2, max(1, len(rows) // 12)):
        one, two = rows[start], rows[start + 2]
        yield f"{one.label} | {two.label}", torch.stack([one.x, one.y, two.x, two.y])
        yield f"{one.label} and its antipode", torch.stack([one.x, -one.x, one.y])
    for row in rows:
        if "parallel and short" in row.label and "axis" not in row.label:
            ray = [row.x, row.x * 2, row.x * 0.5]
            yield f"{row.label}, many", torch.stack(ray)
            yield f"{row.label}, coincident", row.x.repeat(3, 1)
            yield f"{row.label}, and beside", torch.stack([*ray, row.x.flip(0), row.x * -0.125])


def centroid_errors(kappa: float, dtype: torch.dtype, *, dims: Sequence[int] = (1, 2, 3)) -> Iterator[Error]:
    """Compare the midpoint of eq. 4 and its gradients in points, weights and curvature."""
    for dim in dims:
        generator = torch.Generator().manual_seed(dim)
        for label, spaces in clusters(kappa, dtype, dim):
            manifold = Lorentz(kappa, learnable=True, dtype=dtype)
            parameter, slope = curvature_of(manifold)
            exact_kappa = mpf(float(manifold.curvature.detach()))
            x = manifold.lift(spaces).detach().requires_grad_()
            weights = torch.rand(len(spaces), generator=generator).to(dtype).requires_grad_()
            output = manifold.centroid(x, weights)
            arguments = [oracle.exact(row) for row in [*spaces.tolist(), weights.tolist()]]
            with oracle.working(*arguments, kappa=exact_kappa):
                truth = oracle.centroid(*arguments, exact_kappa)
                yield Error("centroid.space", label, relative(output[1:], truth[1:]))
                yield Error("centroid.time", label, relative(output[:1], truth[:1]))
                slopes = oracle.jacobian(oracle.centroid, arguments, exact_kappa)
                width = output.shape[-1]
                for part, weight in cotangents(OPERATIONS["expmap"], width, dtype).items():
                    gradients = torch.autograd.grad(output, [x, weights, parameter], weight, retain_graph=True)
                    weigh = oracle.exact(weight.tolist())
                    wants = [[oracle.dot(weigh, c) for c in columns] for columns in slopes]
                    # The points share one output: a gradient is judged against the largest of them.
                    flat = [value for want in wants[:-2] for value in want]
                    yield Error(f"centroid{part} dx", label, relative(gradients[0][:, 1:], flat))
                    for at, ours, want in zip(arguments, gradients[0][:, 1:], wants, strict=False):
                        if part == ".space":
                            found = stray(ours, want, at, exact_kappa, dual=True)
                            yield Error("centroid dx in the metric", label, found)
                    # It vanishes where points coincide: a billionth of what cancels will do.
                    size = sqrt(oracle.dot(weigh, weigh) * oracle.dot(truth, truth)) / 10**9
                    yield Error(f"centroid{part} dweights", label, relative(gradients[1], wants[-2], scale=size))
                    terms = [w * s for w, s in zip(weigh, slopes[-1][0], strict=True)]
                    scale = curvature_scale(slope, exact_kappa, weigh, terms, truth)
                    want = [slope * mp.fsum(terms)]
                    yield Error(f"centroid{part} dkappa", label, relative(gradients[2], want, scale=scale))


def ball_errors(name: str, kappa: float, dtype: torch.dtype, *, dims: Sequence[int] = (1, 3)) -> Iterator[Error]:
    """Compare a chart's inverse, from the centre of the ball to a unit in the last place inside."""
    reference = {"from_poincare": oracle.from_poincare, "from_klein": oracle.from_klein}[name]
    for dim in dims:
        generator = torch.Generator().manual_seed(dim)
        manifold = Lorentz(kappa, learnable=True, dtype=dtype)
        parameter, slope = curvature_of(manifold)
        exact_kappa = mpf(float(manifold.curvature.detach()))
        rays = torch.randn(8, dim, generator=generator, dtype=torch.float64)
        rays = rays / rays.norm(dim=-1, keepdim=True) / abs(kappa) ** 0.5
        depths = torch.tensor([0.0, 1e-6, 0.01, 0.5, 0.9, 0.999, 1 - 1e-5, 1 - 1e-6])
        ball = (rays * depths[:, None]).to(dtype).requires_grad_()
        output = getattr(manifold, name)(ball)
        for index, depth in enumerate(depths.tolist()):
            space = oracle.exact(ball[index].tolist())
            label = f"{depth:g} of the radius, dim={dim}"
            with oracle.working(space, kappa=exact_kappa):
                truth = reference(space, exact_kappa)
                yield Error(f"{name}.space", label, relative(output[index, 1:], truth[1:]))
                slopes = oracle.jacobian(reference, [space], exact_kappa)
                for part, weight in cotangents(OPERATIONS["expmap"], dim + 1, dtype).items():
                    dp, dkappa = torch.autograd.grad(output[index], [ball, parameter], weight, retain_graph=True)
                    weigh = oracle.exact(weight.tolist())
                    want = [oracle.dot(weigh, column) for column in slopes[0]]
                    yield Error(f"{name}{part} dp", label, relative(dp[index], want))
                    terms = [w * s for w, s in zip(weigh, slopes[-1][0], strict=True)]
                    scale = curvature_scale(slope, exact_kappa, weigh, terms, truth)
                    want = [slope * mp.fsum(terms)]
                    yield Error(f"{name}{part} dkappa", label, relative(dkappa, want, scale=scale))
