r"""The constant of Theorem RC's form ``cubic`` for N >= 2, and a form that knows that weights are nearly products.

In the form ``cubic`` the constant :math:`s N^2 / 4` asks that half of a query's weight lies on tuples of one extreme
token and half on tuples of the other. Without a mask, or under one mask of *tokens*, the weights cannot do that for
nothing: but for the logits the N keys of a tuple are independent. Let :math:`\delta = \mathrm{diam} X`,
:math:`L = \max_m |W_V^m| \delta \prod_{j \ne m} \hat v_j`,
:math:`\zeta = s |W_K^0| \delta \max_m |W_K^m| \delta \prod_{j \ne m} \hat k_j` and
:math:`z = s \hat k_0 \max_{m < l} |W_K^m| |W_K^l| \delta^2 \prod_{j \ne m, l} \hat k_j`, j among the keys;
without biases :math:`\zeta = z = s \prod |W_K| R^{N-1} \delta^2`.

**Theorem RC, form** ``chain`` (ours). With :math:`t = \tanh(z/4)` and j the number of keys that follow,

.. math:: \mathrm{diam} f \le L \sum_{j=0}^{N-1} (1 + a_j) \tanh\frac{\zeta + d_j}4, \qquad
    a_j = \min\Big( j \tanh\frac{jz}4,\; \frac{jt}{1 - (j-1)t} \Big),

.. math:: d_j = \min\Big( 2 \log \frac{\cosh(j(\zeta + z)/4)}{\cosh(j(\zeta - z)/4)},\;
    \frac{j \zeta z}{4(1 - (j-1)t)} \Big),

the second of each where :math:`(j-1)t < 1`.

*Proof.* Let :math:`q_0, q_1` be two queries, e the direction of the difference of their outputs,
:math:`F(K) = \langle e, T_K\rangle`, :math:`A_0, A_1` their weights and :math:`g_m = E_0[F | k_1, .., k_m]`. Then
:math:`E_1 F - E_0 F = \sum_m E_1 \int g_m\, (A_1 - A_0)(dk_m | k_1, .., k_{m-1})`: each term is at most the oscillation
of :math:`g_m` in its last key times a total variation.

The oscillation: F moves by L at most with one key, and the law of the j keys that follow by a density of the logits
:math:`H = s\langle q_0, \kappa_b - \kappa_a\rangle`, which move by z at most with one key: second differences of a
multilinear form. So its total variation is at most :math:`\tanh(jz/4)` and F moves by jL, which gives the first
:math:`a_j`; and Dobrushin's comparison, every key's law moving with another key by t at most, gives the second.

The total variation: :math:`A_1 \propto A_0 e^G` with :math:`G = s\langle q_1 - q_0, \kappa\rangle`, which moves by
:math:`\zeta` with one key, so the two laws of :math:`k_m` differ by the density :math:`E_0[e^G | k_1, .., k_m]`, whose
logarithm moves by :math:`\zeta` through G and by :math:`\log E_b e^G / E_a e^G` through the law of the j keys after it.
That is :math:`\log E_a e^{G+H} E_a 1 / (E_a e^G E_a e^H)`, largest for two events that are one, of a weight that makes
it the first :math:`d_j`. Else, along segments from :math:`q_0` to :math:`q_1` and from a to b, it is the mean of a
covariance of two functions that move by :math:`\zeta` and z with one key, at most
:math:`\tfrac14 j \zeta z / (1 - (j-1)t)` by Dobrushin's comparison once more. QED.

As z goes to 0 this is :math:`s N/4`, N times below the form ``cubic``. Together with :math:`N L \tanh(Nz/4)`, which is
the form ``weights``, it gives
:math:`\mathrm{diam} f \le c_N \tfrac{s N^2}4 \prod |W_K| \prod |W_V| R^{2(N-1)} \delta^3` with
:math:`c_1 = 1`, :math:`0.621 \le c_2 \le 0.684`, :math:`0.538 \le c_3 \le 0.715` and
:math:`0.477 \le c_N \le 0.762` at every N from 2 on that was tried, to 1024 (:func:`cubic_constant`).

Under a mask of *simplexes*, shared by all queries, :math:`c_N = 1` for every N: if tuples of equal tokens alone count,
:math:`\kappa` and T take two values, and nothing is lost as s goes to 0 and R grows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Float
from holonomy.theory.attention.projections import Projections, tuple_products
from holonomy.theory.attention.sizes import diameter

# Relative steps of the scan that proves the upper end, and what it gives away.
_STEP = 1 / 2000


class Bracket(NamedTuple):
    """A lower and an upper bound of a constant, both proved."""

    lower: float
    upper: float


def chain(order: int, field: Float[Tensor, "*batch"], interaction: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """How many times L the output's diameter can be, by the form ``chain``: the sum over j."""
    single = torch.tanh(interaction / 4)
    total = torch.zeros_like(field)
    for j in range(order):
        left = 1 - (j - 1) * single
        near = torch.where(left > 0, left, 1.0)
        few = left > 0
        moved = j * torch.tanh(j * interaction / 4)
        moved = torch.where(few, torch.minimum(moved, j * single / near), moved)
        shift = 2 * (_log_cosh(j * (field + interaction) / 4) - _log_cosh(j * (field - interaction) / 4))
        shift = torch.where(few, torch.minimum(shift, j * field * interaction / (4 * near)), shift)
        total = total + (1 + moved) * torch.tanh((field + shift) / 4)
    return total


def _log_cosh(x: Tensor) -> Tensor:
    return x.abs() + torch.nn.functional.softplus(-2 * x.abs()) - math.log(2)


def cubic_constant(order: int) -> Bracket:
    """Bracket the least :math:`c_N` for which Theorem RC's ``cubic`` holds with :math:`c_N s N^2 / 4`.

    For attention without a mask, or with one mask of tokens. From below by :func:`two_places`, from above by
    :func:`chain`: every factor of the sum grows with z and every other bound over z falls, so that a scan whose cells
    take the one at their right end and the other at their left end misses nothing.
    """
    first, last = 1 / (10 * order), 40 / order
    steps = math.ceil(math.log(last / first) / _STEP)
    z = first * torch.exp(torch.linspace(0, math.log(last / first), steps + 1, dtype=torch.float64))
    left, right = z[:-1], z[1:]
    weights = 4 * torch.tanh(order * left / 4) / (order * left)
    chained = 4 * chain(order, right, right) / (order**2 * left)
    # Below the first cell tanh x <= x leaves sums of increasing terms; above the last one the weights' form is small.
    single = math.tanh(first / 4)
    j = torch.arange(order, dtype=torch.float64)
    small = ((1 + single) / (1 - (j - 1) * single) * (1 + j * first / (4 * (1 - (j - 1) * single)))).sum()
    cells = torch.cat([torch.minimum(weights, chained), (small / order**2)[None]])
    # An upper end of 1 is the form ``cubic`` itself.
    upper = min(1.0, cells.amax().item())
    return Bracket(two_places(order, z).amax().item(), upper)


def two_places(order: int, z: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    r"""The share of the form ``cubic`` that one token against a crowd comes near to, as both lie far out.

    One dimension, all weights 1, tokens at R and :math:`R - \delta`, :math:`R/\delta \to \infty` at a fixed
    :math:`z = s R^{N-1} \delta^2`, as many copies of each as let both queries lean to their own side: with M the sum of
    N signs, weighted by :math:`\exp(z M^2/8 + z M/4)`, the share is :math:`4 E[M] / (N^2 z)`. For N = 2 that is
    :math:`2 (e^z - 1) / (z (e^z + 3))`; as N grows its largest value tends to that of :math:`\tanh^3(x)/x`, 0.496.
    """
    up = torch.arange(order + 1, dtype=z.dtype, device=z.device)
    signs = 2 * up - order
    ways = torch.lgamma(up.new_tensor(order + 1.0)) - torch.lgamma(up + 1) - torch.lgamma(order - up + 1)
    weights = (ways + z[..., None] * (signs.square() / 8 + signs / 4)).softmax(-1)
    return 4 * (weights @ signs) / (order**2 * z)


def crowded(order: int, copies: float) -> float:
    """The best share of the form ``cubic`` for one token and a crowd of copies of another, in one dimension."""
    gap = torch.logspace(-3, 0, 400, dtype=torch.float64)[:, None, None]
    z = torch.linspace(0.02, 4.0, 300, dtype=torch.float64)[None, :, None]
    single = torch.arange(order + 1, dtype=torch.float64)
    ways = torch.tensor([math.comb(order, j) for j in range(order + 1)], dtype=torch.float64).log()
    products = (1 - gap) ** (order - single)
    prior = ways + (order - single) * math.log(copies)
    high, low = (((query * z / gap**2 * products + prior).softmax(-1) * products).sum(-1) for query in (1.0, 1 - gap))
    return ((high - low).abs() * 4 / (order**2 * (z * gap).squeeze(-1))).amax().item()


def climb_constant(
    order: int, features: int, places: int, generator: torch.Generator, *, starts: int = 16, steps: int = 200
) -> float:
    """The best share of the form ``cubic`` that an ascent finds: tokens, all matrices, scale, how many copies of each.

    Numbers of copies are real and positive: a supremum over integers comes as near as one likes.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    axis = torch.eye(features, dtype=torch.float64)[0]
    x = normal(starts, places, features) / 2 + 12 * normal(starts, 1, 1).sigmoid() * axis
    keys, values = (0.3 * normal(starts, m, features, features) + axis[:, None] * axis for m in (order + 1, order))
    free = [x, keys, values, normal(starts, places), normal(starts)]
    for part in free:
        part.requires_grad_()
    optimizer = torch.optim.Adam(free, lr=0.03)
    best = 0.0
    for _ in range(steps):
        share = _share(order, *free)
        best = max(best, share.amax().item())
        optimizer.zero_grad()
        (-numerics.positive(share).log().sum()).backward()
        optimizer.step()
    return best


def _share(order: int, x: Tensor, keys: Tensor, values: Tensor, copies: Tensor, log_z: Tensor) -> Tensor:
    """Diameter of the output over the form ``cubic``, for batches of tokens with numbers of copies."""
    k, v = (x[:, None] @ (w / torch.linalg.matrix_norm(w, 2)[..., None, None]) for w in (keys, values))
    kappa, products, prior = tuple_products(k.unbind(1)[1:]), tuple_products(v.unbind(1)), copies
    for _ in range(1, order):
        prior = (prior[:, :, None] + copies[:, None]).flatten(1)
    z, gap = log_z.exp(), diameter(x)
    far = x.norm(dim=-1).amax(-1) ** (order - 1)
    scale = z / (far * gap**2)
    logits = scale[:, None, None] * k[:, 0] @ kappa.mT + prior[:, None]
    return diameter(logits.softmax(-1) @ products) * 4 / (order**2 * far * gap * z)


def diagonal_simplexes(order: int, far: float) -> tuple[Projections, Tensor, Tensor]:
    """Two tokens far out in one dimension and a mask that leaves simplexes of equal keys: ``cubic`` is nearly exact."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    # Logits so small that both tuples weigh the same, whatever the query.
    scale = 1 / (100 * order * far**order)
    layer = Projections(one.expand(order + 1, 1, 1, 1), one.expand(order, 1, 1, 1), scale=scale)
    mask = torch.zeros([2] * (order + 1), dtype=torch.bool)
    for token in range(2):
        mask[(slice(None), *[token] * order)] = True
    return layer, torch.tensor([[far], [far - 1]], dtype=torch.float64), mask
