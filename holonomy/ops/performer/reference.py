r"""Linear attention of many heads over the same rows, where queries and keys are few linear maps of them.

.. math::

    L_f &= \log \textstyle\sum_i e^{\ell_f(k_i)} &\quad (1) \\
    M_f &= \textstyle\sum_i \mathrm{softmax}_i(\ell_f(k_i))\, v_i &\quad (2) \\
    o_j &= x_j D + \textstyle\sum_f \mathrm{softmax}_f(\ell_f(q_j) + L_f)\, M_f &\quad (3)

with :math:`\ell_f` of :func:`~holonomy.ops.performer.features.log_features`; f runs over the random features of all
heads, and the softmax of equation 3 over those of one head. Keys are ``x @ weight + bias``, values the columns
``first`` to ``last`` of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holonomy._shapes import Float
from holonomy.ops.performer.features import log_features


def pool_keys_reference(
    x: Tensor, weight: Tensor, bias: Tensor, projection: Tensor, first: int, last: int
) -> tuple[Float[Tensor, "heads features"], Float[Tensor, "values_and_one heads_features"]]:
    """Largest logarithms by feature, and sums over the keys relative to them: of the values, and last of ones."""
    logs = log_features((x @ weight + bias).unflatten(-1, (-1, projection.shape[1])), projection)
    top = logs.detach().amax(0)
    phi = (logs - top).exp().flatten(1)
    values_and_one = torch.cat([x[:, first:last], torch.ones_like(x[:, :1])], -1)
    return top, values_and_one.to(phi.dtype).mT @ phi


def attend_pooled_reference(
    x: Tensor, weight: Tensor, bias: Tensor, projection: Tensor, logs: Tensor, means: Tensor, direct: Tensor
) -> Tensor:
    """Equation 3, with the arguments of :func:`~holonomy.ops.performer.attend_pooled`."""
    query = (x @ weight + bias).unflatten(-1, (-1, projection.shape[1]))
    probs = (log_features(query, projection, of_query=True) + logs).softmax(-1).flatten(1)
    return x @ direct + probs.to(means.dtype) @ means.flatten(0, 1)
