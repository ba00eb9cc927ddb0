r"""How the constants of layers compose: a tape that follows regions and writes one row a layer (H12)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from holonomy.layers import HypLinearAttention, HypResidual, HypSoftmaxAttention
from holonomy.theory.attention.projections import NotCoveredError
from holonomy.theory.attention.sizes import times
from holonomy.theory.certificates.constants.midpoint import midpoint_shares, residual_stretch
from holonomy.theory.certificates.regions import (
    Region,
    Setting,
    Step,
    follow,
    refuse_other_curvature,
    refuse_own,
    root,
    rounding,
    units_of,
)
from holonomy.theory.certificates.stretching import Ends, Metric, ends_of, stretch


@dataclass(frozen=True)
class Row:
    """One layer of a certificate, in the layer's own distances."""

    name: str  #: of the layer
    constant: float  #: by how much it can stretch on its region
    radius_in: float  #: within which its inputs lie about the origin
    radius_out: float  #: its outputs
    theorem: str  #: by which the constant was found
    #: whether a later row takes its place in the product, that of the residual connection of the branch that it is part
    #: of, or, at an input, that of the run of token-wise layers that it belongs to
    branch: bool = False


class Tape:
    """Follows layers and writes rows; constants and radii in unit coordinates until they are written."""

    # At an input, layers that take tokens by themselves are collected into runs, whose stretch is computed as one: a
    # product of norms would forget in which directions each of them stretches.

    def __init__(self, region: Region, setting: Setting) -> None:
        self.region = region
        self.setting = setting
        self.constant = 1.0
        self.rows: list[Row] = []
        self.run: list[tuple[Callable[[Tensor], Tensor], Row, Ends, tuple[float, float]]] = []
        self.start: Region | None = None
        self.depth = 0
        self.unit: float | None = None  # of length where the last layer ended

    @property
    def local(self) -> bool:
        """Whether the tape follows one input, and nothing about it."""
        return self.region.exact_points is not None

    def take(self, name: str, layer: Any) -> None:
        """Let one layer act."""
        refuse_own(layer)
        step, prior = follow(layer, self.region, self.setting), None
        if self.region.points is not None:
            # At an input some layers are covered that have no constant on a ball.
            with suppress(NotCoveredError):
                prior = follow(layer, Region(self.region.radius, self.region.features), self.setting)
        joint = isinstance(layer, HypLinearAttention | HypSoftmaxAttention)
        self.write(name, step, units_of(layer), None if joint else layer, ends_of(layer), prior)

    def write(
        self,
        name: str,
        step: Step,
        units: tuple[float, float],
        function: Callable[[Tensor], Tensor] | None,
        ends: Ends,
        prior: Step | None,
    ) -> None:
        """Write a step down.

        ``function`` is what it does to each token, ``None`` if tokens influence each other; ``prior`` the step on the
        whole ball about the origin, which caps one at or about points.
        """
        self._require_unit(name, units[0])
        if self.region.points is not None:
            step = self._capped(step, prior)
        before, after = units
        radii = self.region.radius / before, step.region.radius / after
        row = Row(name, step.constant * before / after, *radii, step.theorem, self.depth > 0)
        if self.local and function is not None and not self.depth:
            self.start = self.region if self.start is None else self.start
            self.run.append((function, row, ends, units))
            self.rows.append(replace(row, branch=True))
        else:
            # What lies in a branch leaves the run around it alone.
            if not self.depth:
                self.close()
            self._multiply(step.constant)
            self.rows.append(row)
        self.region, self.unit = step.region, units[1]

    def _require_unit(self, name: str, unit: float) -> None:
        if self.unit is not None:
            refuse_other_curvature(self.unit, unit, name)

    def _capped(self, step: Step, prior: Step | None) -> Step:
        """Room for rounding, which only differences at a point need, and the cap of what holds on the whole ball."""
        constant = step.constant * rounding(_farthest(self.region.radius, step.region.radius))
        radius = step.region.radius
        if prior is not None:
            constant, radius = min(constant, prior.constant), min(radius, prior.region.radius)
        region = replace(step.region, radius=radius, spread=times(self.region.spread, constant))
        return replace(step, constant=constant, region=region)

    def close(self) -> None:
        """End a run of layers: its stretch is taken as a whole, and never above the product."""
        if self.start is None or self.start.points is None:
            return
        functions, rows, ends, units = zip(*self.run, strict=True)
        first, last = ends[0].source, ends[-1].target

        def whole(x: Tensor) -> Tensor:
            return reduce(lambda y, function: function(y), functions, x)

        far = _farthest(*(row.radius_in * unit[0] for row, unit in zip(rows, units, strict=True)), self.region.radius)
        constant = stretch(whole, self.start.points, ends=Ends(first, last)).amax().item() * rounding(far)
        constant = min(constant, math.prod(row.constant for row in rows))
        name = rows[0].name if len(rows) == 1 else f"{rows[0].name} .. {rows[-1].name}"
        self.rows.append(Row(name, constant, rows[0].radius_in, rows[-1].radius_out, "Lemma 0"))
        self._multiply(constant * units[-1][1] / units[0][0])
        self.run, self.start = [], None

    def _multiply(self, constant: float) -> None:
        self.constant = times(self.constant, constant)

    def residual(
        self,
        name: str,
        layer: HypResidual,
        branch: Callable[[Tape], None],
        function: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Follow a branch, then the midpoint of its end and its start; ``function`` as in :meth:`write`."""
        if function is None:
            self.close()
        start, product, unit = self.region, self.constant, self.unit
        self.constant, self.depth = 1.0, self.depth + 1
        branch(self)
        self._require_unit(name, root(layer.manifold_branch))
        inner, end = self.constant, self.region
        self.constant, self.region, self.depth, self.unit = product, start, self.depth - 1, unit
        prior = Step(
            residual_stretch(inner, layer.epsilon), Region(max(start.radius, end.radius), start.features), "H7"
        )
        step = prior
        if start.points is not None and end.points is not None:
            constant = prior.constant
            if start.spread == 0:
                constant = _local_residual(layer, start.points, end.points, inner, self.setting.metric)
            points = layer(start.points, end.points).detach()
            step = Step(constant, Region.about(points, layer.manifold_out, times(start.spread, constant)), "H7")
        self.write(name, step, units_of(layer), function, ends_of(layer), prior)


def _farthest(*radii: float) -> float:
    """The largest finite radius; Euclidean outputs have none."""
    return max((radius for radius in radii if math.isfinite(radius)), default=math.inf)


def _local_residual(layer: HypResidual, x: Tensor, branch: Tensor, branch_constant: float, metric: Metric) -> float:
    """H5 at the input: each token moves by its share, the branch by the rest."""
    pair = [
        root(manifold) * points.double()[..., 1:]
        for manifold, points in ((layer.manifold_in, x), (layer.manifold_branch, branch))
    ]
    both = torch.stack(pair, -2)
    weights = both.new_tensor([[1.0, layer.epsilon]]).expand(*both.shape[:-2], 1, 2)
    shares, _ = midpoint_shares(weights, both)
    # The midpoint moves by p_x d + p_F Lip(F) d; in l2, tokens with different shares also obey Cauchy-Schwarz.
    stay, move = shares[..., 0, 0], shares[..., 0, 1]
    if metric == "sup":
        return (stay + move * branch_constant).amax().item()
    apart = stay.amax().item() + move.amax().item() * branch_constant
    return min(apart, math.sqrt(stay.amax().item() + move.amax().item() * branch_constant**2))
