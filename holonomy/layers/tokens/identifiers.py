r"""Node identifiers: one vector a node, by which a transformer sees which tokens share a node (TokenGT section 2, A.3).

Identifiers are the rows of a matrix P, ``(n, dim)``. Where the n nodes of a graph fit into the ``dim`` channels, the
rows are orthonormal, :math:`P P^\top = I`, filled up with channels of zeros. Where n > dim, they cannot be: then the
columns are orthogonal, of length :math:`\sqrt{n / \mathrm{dim}}` each, so that the squared lengths of the rows have
mean one, and :math:`P P^\top` is :math:`n / \mathrm{dim}` times a projection of rank dim, the best of its rank. That
rule holds for orthogonal and for Laplacian identifiers. Each graph of a batch has identifiers of its own.

``batch`` is the graph of each node ``(n,)``, one graph if left out; random numbers come from ``generator``, torch's
seeded state if left out, and are the same for every dtype. A number that is no integer is a
TypeError; one out of range, or a shape that does not fit, is a ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor

from holonomy import checks
from holonomy._autograd import as_array, eager
from holonomy._shapes import Float, Int

# Up to here all eigenvectors by LAPACK take less than a second; beyond it the few that are wanted by block Lanczos.
_DENSE_NODES = 1024
# Restarts that the matrix may take, judged by its pace from a quarter of them on; then its inverse takes its place. At
# the end of the spectrum of a path or a wide grid eigenvalues lie so close together that the matrix itself takes hours;
# of a random graph the inverse does, whose factors fill up.
_RESTARTS = 240
# How far beyond the end of the spectrum that inverse is taken.
_SHIFT = 2**-14
# Residuals of eigenvectors, relative to the largest eigenvalue; and how many blocks there are between two restarts.
_RESIDUAL, _BLOCKS = 2**-38, 6


def orthogonal_identifiers(
    n: int,
    dim: int,
    *,
    batch: Int[Tensor, " nodes"] | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "nodes dim"]:
    """Rows of a uniformly random orthogonal matrix, one matrix a graph (TokenGT, orthogonal random features).

    The result lies on ``device``, or that of ``batch`` or the generator.

    >>> p = orthogonal_identifiers(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> torch.allclose(p @ p.mT, torch.eye(3, dtype=torch.float64))
    True
    """
    _check_sizes(n, dim, batch, dtype)
    checks.generator(generator)
    device = _device(device, batch, generator)
    out = torch.zeros(n, dim, device=device, dtype=dtype)
    if batch is None:
        return _placed(out, torch.arange(n, device=device)[None], _uniform(1, n, dim, generator, device))
    for nodes in _graphs_by_size(batch.to(device)):
        out = _placed(out, nodes, _uniform(nodes.shape[0], nodes.shape[1], dim, generator, device))
    return out


def near_orthogonal_identifiers(
    n: int,
    dim: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "nodes dim"]:
    r"""Random signs over :math:`\sqrt{\mathrm{dim}}`: unit rows whose products are small for any number of nodes.

    TokenGT A.4, "Near-ORF", whose entries are printed as :math:`\pm 1/d_p`; rows of length one need the root. A product
    of two rows has mean 0 and variance 1/dim. The result lies on ``device``, or that of the generator.

    >>> near_orthogonal_identifiers(2, 4).abs()
    tensor([[0.5000, 0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000, 0.5000]])
    """
    _check_sizes(n, dim, None, dtype)
    checks.generator(generator)
    device = _device(device, None, generator)
    drawn = generator.device if generator is not None else device
    signs = 2 * torch.randint(2, (n, dim), generator=generator, device=drawn) - 1
    return torch.empty(n, dim, device=device, dtype=dtype).copy_(signs) / math.sqrt(dim)


@eager
def laplacian_identifiers(
    edge_index: Int[Tensor, "2 edges"],
    n: int,
    dim: int,
    *,
    which: Literal["lowest", "both"] = "lowest",
    batch: Int[Tensor, " nodes"] | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "nodes dim"]:
    r"""Eigenvectors of :math:`I - D^{-1/2} A D^{-1/2}` of each graph, the lowest first (TokenGT section 2, A.3, A.4).

    A counts how often an edge is listed, in the direction in which that is more often; self-loops do not count, and an
    isolated node has the eigenvalue 1. An eigenvector is defined up to its sign, which is taken such that the sum of
    the cubes of its entries is positive where it does not vanish, and several of one eigenvalue up to an orthogonal
    matrix, which is arbitrary. Computed in float64 on the CPU, by LAPACK for up to 1024 nodes, by a block Lanczos
    method beyond: compute them once for a data set and pass them to the model.

    Args:
        edge_index: ``(2, m)`` int64, sources and targets.
        n: number of nodes.
        dim: number of channels; see the head of this module for n > dim.
        which: where n > dim, ``"lowest"`` eigenvalues, or ``"both"``: the lower half of them and the upper half.
        batch: the graph of each node ``(n,)``; one graph if left out.
        dtype: of the result.

    Returns:
        ``(n, dim)`` on the device of ``edge_index``.

    Raises:
        TypeError: if ``dim`` or ``edge_index`` are not integers.
        ValueError: if ``which`` is none of the two, ``dim`` is not positive, ``batch`` has not one entry a node, or
            ``edge_index`` has no shape ``(2, m)``, names a node that is not there or joins two graphs.

    >>> edge = torch.tensor([[0, 1], [1, 0]])
    >>> laplacian_identifiers(edge, 2, 3).abs()
    tensor([[0.7071, 0.7071, 0.0000],
            [0.7071, 0.7071, 0.0000]])
    """
    checks.one_of("which", which, ("lowest", "both"))
    _check_sizes(n, dim, batch, dtype)
    checks.edges(edge_index, n, batch)
    found = torch.empty(n, dim, device=edge_index.device, dtype=dtype)
    if edge_index.is_meta:
        return found
    source, target = as_array(edge_index)
    graph = np.zeros(n, dtype=np.int64) if batch is None else as_array(batch)
    # The nodes of each graph side by side, so that it is a block of the matrix.
    order = graph.argsort(kind="stable")
    place = order.argsort()
    normalised = _normalised_adjacency(place[source], place[target], n)
    out = np.zeros((n, dim))
    for start, end in pairwise([0, *np.bincount(graph).cumsum().tolist()]):
        if start < end:
            vectors = _eigenvectors(normalised[start:end, start:end], dim, which)
            out[order[start:end], : vectors.shape[1]] = vectors * math.sqrt(max(end - start, dim) / dim)
    return found.copy_(torch.from_numpy(out))


def perturb_identifiers(
    identifiers: Float[Tensor, "nodes dim"],
    *,
    batch: Int[Tensor, " nodes"] | None = None,
    sign_flip: bool = True,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "nodes dim"]:
    """Random signs of each graph's eigenvectors, and whole eigenvectors dropped: for training (TokenGT A.3).

    A column of ``identifiers`` is an eigenvector. ``sign_flip`` multiplies each column of each graph by 1 or -1; with
    the probability ``dropout`` a column of a graph is zero, and the others are divided by one minus it.

    >>> _ = torch.manual_seed(0)
    >>> perturb_identifiers(torch.ones(2, 4))
    tensor([[-1.,  1.,  1., -1.],
            [-1.,  1.,  1., -1.]])
    """
    checks.floating("identifiers", identifiers)
    checks.rows("identifiers", identifiers, identifiers.shape[-1] if identifiers.ndim else 0, "dim")
    checks.in_range("dropout", dropout, 0.0, 1.0)
    checks.generator(generator)
    if batch is not None:
        checks.membership(batch, identifiers.shape[0])
    graphs = 1 if batch is None else int(batch.max()) + 1 if batch.numel() else 0
    factor = identifiers.new_ones(graphs, identifiers.shape[-1])
    checks.flags(sign_flip=sign_flip)
    drawn = identifiers.device if generator is None else generator.device
    if sign_flip:
        signs = torch.randint(2, factor.shape, generator=generator, device=drawn)
        factor = factor * (2 * signs - 1).to(identifiers)
    if dropout > 0.0:
        uniform = torch.rand(factor.shape, generator=generator, device=drawn, dtype=torch.float32)
        kept = (uniform >= dropout).to(identifiers)
        factor = factor * kept / (1 - dropout) if dropout < 1.0 else factor * kept
    return identifiers * (factor if batch is None else factor[batch.long()])  # bytes would be a mask


def _check_sizes(n: int, dim: int, batch: Tensor | None, dtype: torch.dtype | None) -> None:
    checks.nonnegative_int("n", n)
    checks.positive_int("dim", dim)
    checks.floating_dtype(dtype)
    if batch is not None:
        checks.membership(batch, n)


def _device(
    device: torch.device | str | None, batch: Tensor | None, generator: torch.Generator | None
) -> torch.device | str | None:
    if device is None and batch is not None:
        return batch.device
    return generator.device if device is None and generator is not None else device


def _graphs_by_size(batch: Tensor) -> list[Tensor]:
    """The nodes of the graphs of each size, ``(graphs, size)``, so that graphs of one size are done at once."""
    found: dict[int, list[Tensor]] = {}
    for nodes in batch.argsort(stable=True).split(torch.bincount(batch).tolist()):
        found.setdefault(len(nodes), []).append(nodes)
    return [torch.stack(found[size]) for size in sorted(found) if size]


def _placed(out: Tensor, nodes: Tensor, columns: Tensor) -> Tensor:
    """Write the columns (graphs, size, least of size and dim) into the rows of their nodes, by the rule for n > dim."""
    size, dim = nodes.shape[1], out.shape[1]
    scaled = columns * math.sqrt(max(size, dim) / dim)
    filled = torch.nn.functional.pad(scaled, (0, dim - columns.shape[-1]))
    return out.index_copy_(0, nodes.flatten(), filled.flatten(0, 1).to(out))


def _uniform(
    graphs: int, size: int, dim: int, generator: torch.Generator | None, device: torch.device | str | None
) -> Tensor:
    drawn = device if generator is None else generator.device
    shape = (graphs, size, min(size, dim))
    gaussian = torch.randn(shape, generator=generator, device=drawn, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    # QR alone is not uniform: it prefers a sign of the diagonal of R.
    return (q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :]).to(device)


def _normalised_adjacency(source: Any, target: Any, n: int) -> Any:
    kept = source != target
    listed = scipy.sparse.csr_array((np.ones(int(kept.sum())), (source[kept], target[kept])), shape=(n, n))
    adjacency = listed.maximum(listed.T)
    weight = 1 / np.sqrt(np.maximum(adjacency.sum(1), 1))
    return scipy.sparse.csr_array(adjacency * weight[:, None] * weight[None, :])


def _eigenvectors(normalised: Any, dim: int, which: str) -> Any:
    """Eigenvectors (size, least of size and dim) of one graph, by ascending eigenvalue of I - M."""
    size = normalised.shape[0]
    wanted = min(size, dim)
    high = wanted // 2 if which == "both" and size > dim else 0
    low = wanted - high
    if size <= _DENSE_NODES or 2 * wanted > size:
        every = np.linalg.eigh(np.eye(size) - normalised.toarray())[1]
        vectors = np.concatenate([every[:, :low], every[:, size - high :]], 1)
    else:
        # The lowest of I - M are the largest of M. The highest stand beside them, for an eigenvalue may reach from one
        # end to the other.
        vectors = _largest(normalised, low, np.empty((size, 0)))
        if high:
            vectors = np.concatenate([vectors, _largest(-normalised, high, vectors)[:, ::-1]], 1)
    return vectors * np.where((vectors**3).sum(0) < 0, -1.0, 1.0)


def _largest(matrix: Any, count: int, known: Any) -> Any:
    """Eigenvectors (size, count) of the largest eigenvalues, the largest first, orthogonal to known ones."""
    found = _lanczos(matrix.__matmul__, count, known, _RESTARTS)
    if found is None:
        size = matrix.shape[0]
        shifted = scipy.sparse.csc_array((1 + _SHIFT) * scipy.sparse.identity(size) - matrix)
        found = _lanczos(scipy.sparse.linalg.splu(shifted).solve, count, known, None)
    return found


def _lanczos(multiply: Callable[[Any], Any], count: int, known: Any, restarts: int | None) -> Any:
    """The same of a symmetric operator, or None where that would take more restarts."""
    # Block Lanczos with thick restarts and full orthogonalisation: one vector would meet one vector of each eigenspace,
    # a block of ``count`` as many as are wanted. Where its space closes, Ritz vectors are eigenvectors.
    # A fixed start, for the same graph has the same identifiers.
    width = count + min(count, 8)
    block = _orthonormal(np.random.default_rng(0).standard_normal((len(known), width)), known)
    basis, image, restart = known[:, :0], known[:, :0], 0
    while True:
        while block.shape[1] and basis.shape[1] < _BLOCKS * width:
            basis, image = np.concatenate([basis, block], 1), np.concatenate([image, multiply(block)], 1)
            block = _orthonormal(image[:, -block.shape[1] :], np.concatenate([known, basis], 1))
        values, mixed = np.linalg.eigh(basis.T @ image)
        best = mixed[:, ::-1][:, : 2 * width]
        basis, image, values = basis @ best, image @ best, values[::-1]
        left = image[:, :count] - basis[:, :count] * values[:count]
        left -= known @ (known.T @ left)
        restart += 1
        residual, largest = np.linalg.norm(left, axis=0).max(), abs(values).max()
        if residual <= _RESIDUAL * largest:
            return basis[:, :count]
        if restarts and restart >= restarts / 4 and residual > _RESIDUAL ** (restart / restarts) * largest:
            return None
        if not block.shape[1]:
            block = _orthonormal(left, np.concatenate([known, basis], 1))


def _orthonormal(vectors: Any, known: Any) -> Any:
    """An orthonormal basis of what the vectors span beside orthonormal known ones."""
    for _ in range(2):  # the second time removes what rounding left of the known ones
        lengths = np.linalg.norm(vectors, axis=0)
        vectors = vectors[:, lengths > 0] / lengths[lengths > 0]
        vectors = vectors - known @ (known.T @ vectors)
        left, sizes, _ = np.linalg.svd(vectors, full_matrices=False)
        vectors = left[:, sizes > _RESIDUAL]
    return vectors
