r"""What linear maps need to reach points far out, and what reaching costs: steps of gradient descent, and stretch.

Rapidities, curvature -1. Proofs: the page *Linear maps far from the origin*.
"""

from __future__ import annotations

import math


def transformation_steps(start: float, end: float, rate: float, square: float) -> float:
    r"""Steps of gradient descent on the distance that take :class:`~holonomy.layers.HTC` along a ray.

    .. math:: \frac{F(R) - F(r)}{\eta\,(|X|^2 + 1)}, \qquad F(r) = \tfrac14 (\sinh 2r + 2r)

    for small steps: those at a rate above :math:`2 \tanh(D) / (|X|^2 + 1)`, D the distance, leave the ray.

    >>> round(transformation_steps(0.0, 4.0, 0.05, 3.0) / transformation_steps(0.0, 3.0, 0.05, 3.0), 1)
    7.2
    """

    def swept(r: float) -> float:
        return (math.sinh(2 * r) + 2 * r) / 4

    return (swept(end) - swept(start)) / (rate * (square + 1))


def axis_steps(start: float, end: float, rate: float, rapidity: float) -> float:
    r"""The same for one coordinate of :class:`~holonomy.layers.LorentzPLFC` without bias, its z along the input.

    .. math:: \frac{1}{2\eta} \log\frac{R + \sqrt{R^2 + q^2}}{r + \sqrt{r^2 + q^2}}, \qquad
        q = \tfrac12 (\rho^2 - s^2), \quad s = r / \rho .

    The input is at rapidity :math:`\rho`, and :math:`s = |z|` at first.

    >>> [round(axis_steps(1.0, end, 0.05, 1.0)) for end in (2.0, 4.0, 8.0)]
    [7, 14, 21]
    """
    q = (rapidity**2 - (start / rapidity) ** 2) / 2
    return math.log((end + math.hypot(end, q)) / (start + math.hypot(start, q))) / (2 * rate)


def hyperplane_stretch(size: float, rapidity: float) -> float:
    r"""The stretch of two orthogonal hyperplanes of :class:`~holonomy.layers.LorentzPLFC` on their bisector, across it.

    .. math:: \lambda\, \frac{\cosh \lambda a}{\cosh a}, \qquad \sinh a = \frac{\sinh \rho}{\sqrt 2},

    which grows as :math:`e^{(\lambda - 1) \rho}`.

    >>> [round(hyperplane_stretch(1.5, rapidity)) for rapidity in (1.0, 3.0, 5.0, 7.0)]
    [2, 6, 15, 42]
    """
    a = math.asinh(math.sinh(rapidity) / math.sqrt(2))
    return size * math.cosh(size * a) / math.cosh(a)


def least_chart_stretch(reach: float, radius: float) -> float:
    r"""How far any map of :math:`R^n` to the hyperboloid stretches some tangent, if it reaches far out.

    :math:`\sinh(\alpha) / r`, where the sphere of radius r goes around the ball of rapidity :math:`\alpha`.

    >>> round(least_chart_stretch(6.0, 6.0), 1)
    33.6
    """
    return math.sinh(reach) / radius
