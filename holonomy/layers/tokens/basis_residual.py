r"""One sparse equivariant operator beside attention: :math:`X_{ii} + \sum_{j \ne i} X_{ij}` (TokenGT A.5, SEB)."""

from __future__ import annotations

from torch import Tensor

from holonomy._shapes import Float
from holonomy.layers.tokens.tokenizer import Tokens


def basis_residual(
    values: Float[Tensor, "graphs tokens features"], tokens: Tokens
) -> Float[Tensor, "graphs tokens features"]:
    r"""Add to each node the edges that leave it: :math:`X_{ii} \mapsto X_{ii} + \sum_{j \ne i} X_{ij}`, TokenGT A.5.

    ``values`` ``(graphs, tokens, features)`` are what the tokens have become, ``tokens`` their layout, from
    :class:`~holonomy.layers.GraphTokenizer`. Edges, self-loops among them, and ``[graph]`` stay as they are. Linear in
    the edges.

    >>> import torch
    >>> indices = torch.tensor([[0, 0], [1, 1], [0, 1]])
    >>> layout = Tokens(torch.zeros(1, 4, 1), torch.zeros(1, 4) > 0, indices, torch.tensor([1, 2, 3]), 2)
    >>> basis_residual(torch.tensor([[[9.0], [1.0], [2.0], [5.0]]]), layout).flatten()
    tensor([9., 6., 2., 5.])
    """
    edges = tokens.indices[tokens.num_nodes :]
    source, target = edges.unbind(1)
    flat = values.flatten(0, 1)
    leaving = flat[tokens.slots[tokens.num_nodes :]] * (source != target)[:, None]
    return flat.index_add(0, tokens.slots[source], leaving).unflatten(0, values.shape[:2])
