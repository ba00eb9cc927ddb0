r"""Lipschitz constants of hyperbolic linear attention, Hypformer eqs. 14-19 (H10), and of the ends of a model (H11).

Everything is in unit coordinates. The average of space parts is Euclidean: constants E lead from the hyperbolic metric
of the tokens to the Euclidean one of features, and the output's metric is below the Euclidean one. Proofs: the page
*Certificates*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.theory.certificates.stretching import Metric


@dataclass(frozen=True)
class Features:
    """Constants E and radii R of the features of queries, keys and values."""

    stretches: tuple[float, float, float]  # of queries, keys, values: from the hyperbolic to the Euclidean metric
    radii: tuple[float, float, float]  # their greatest lengths
    residual: float  # the norm of the linear map psi that is added


@dataclass(frozen=True)
class Cone:
    r"""What keeps queries from meeting no key: :math:`\langle q_i, k_j\rangle \ge \nu |q_i| |k_j|`."""

    opening: float  # nu
    query: float  # the least length of a query
    key: float  # the least length of a key


def linear_stretch_with_eps(features: Features, eps: float, tokens: int, metric: Metric = "sup") -> float:
    r"""The constant of linear attention whose denominator is :math:`\sum_j \langle q_i, k_j\rangle + \epsilon`: H10.

    .. math:: (\sqrt N + |\psi|_2) E_V + \sqrt2 R_V N (R_K E_Q + R_Q E_K)/\epsilon

    with 1 for :math:`\sqrt N` in the sup metric. N over eps is real: with all keys k and all values v the slope in the
    query is :math:`N |k| |v| / \epsilon` at zero. Without eps there is no constant, the average being discontinuous.
    """
    if eps == 0:
        return math.inf
    e_query, e_key, e_value = features.stretches
    r_query, r_key, r_value = features.radii
    spread = 1.0 if metric == "sup" else math.sqrt(tokens)
    moved = math.sqrt(2) * r_value * tokens * (r_key * e_query + r_query * e_key) / eps
    return (spread + features.residual) * e_value + moved


def linear_stretch_in_cone(features: Features, cone: Cone, tokens: int, metric: Metric = "sup") -> float:
    r"""The constant of linear attention where queries and keys keep to a cone, for any eps, zero included: H10.

    .. math:: \big(\sqrt{\min(N, R_K/(\nu k_0))} + |\psi|_2\big) E_V
        + \sqrt2 R_V \Big(\frac{E_Q}{\nu q_0} + \frac{E_K}{\nu k_0}\Big)

    with 1 for the first root in the sup metric; free of N.
    """
    e_query, e_key, e_value = features.stretches
    _, r_key, r_value = features.radii
    spread = 1.0 if metric == "sup" else math.sqrt(min(tokens, r_key / (cone.opening * cone.key)))
    moved = e_query / (cone.opening * cone.query) + e_key / (cone.opening * cone.key)
    return (spread + features.residual) * e_value + math.sqrt(2) * r_value * moved


def local_linear(features: Sequence[Tensor], stretches: Sequence[Tensor], metric: Metric = "sup") -> float:
    r"""A bound of the Euclidean stretch of the averages of linear attention at an input, all heads together.

    ``features`` are queries, keys and values, ``stretches`` those of their tokens. From
    :math:`dZ_i = \sum_j w_{ij} dV_j + \sum_j (\langle dq_i, k_j\rangle + \langle q_i, dk_j\rangle)(V_j - Z_i)/D_i`,
    D the denominators: the norm of w, of the matrices :math:`\sum_j (V_j - Z_i) k_j^\top / D_i` and of
    :math:`|q_i| |V_j - Z_i| / D_i`, each with its tokens' stretches.
    """
    q, k, v = (numerics.widen(z) for z in features)
    s_query, s_key, s_value = (numerics.widen(s) for s in stretches)
    # w_ij = <q_i, k_j> / D_i and V_j - Z_i.
    meets = q @ k.mT
    total = meets.sum(-1, keepdim=True)
    if not bool((total > 0).all()):
        return math.inf
    weights = meets / total
    away = v[:, None] - (weights @ v)[:, :, None]
    # The three terms of dZ_i: by dV_j, by dq_i, by dk_j.
    of_value = weights * s_value[:, None]
    of_query = torch.linalg.matrix_norm(away.mT @ k[:, None] / total[..., None], 2) * s_query
    of_key = q.norm(dim=-1, keepdim=True) * away.norm(dim=-1) / total * s_key[:, None]
    # Heads are concatenated: their stretches add in squares.
    if metric == "sup":
        return (of_value.sum(-1) + of_query + of_key.sum(-1)).square().sum(0).sqrt().amax().item()
    heads = torch.linalg.matrix_norm(of_value, 2) + of_query.amax(-1) + torch.linalg.matrix_norm(of_key, 2)
    return heads.norm().item()
