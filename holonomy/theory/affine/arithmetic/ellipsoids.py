r"""Sums of many remainders in one ball, and the tokens that are held so: L10.

**L10.** Let :math:`y = \sum_g A_g e_g` with :math:`|e_g|_2 \le 1` for each g, and :math:`\tau_g > 0`. Then y lies in
:math:`L\,\mathrm{Ball}` for every L with

.. math:: L L^\top \succeq \Big(\sum_g \tau_g\Big) \sum_g A_g A_g^\top / \tau_g .

*Proof.* The support of y in the direction w is :math:`\sum_g |A_g^\top w|`, at most :math:`(\sum_g \tau_g)^{1/2}
(\sum_g |A_g^\top w|^2 / \tau_g)^{1/2} \le |L^\top w|` by Cauchy-Schwarz. QED
Equality holds where the :math:`|A_g^\top w|` are as the :math:`\tau_g`; here :math:`\tau_g` is the length of
:math:`A_g`, and an interval is a ball of one column. Where instead :math:`\sum_g |e_g|^2 \le 1`, the sum is the image
of one ball under all columns side by side, so that :math:`L L^\top = \sum_g A_g A_g^\top` loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Float, Int
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, Noise, constant, largest_singular_value

# What moves: the features of one node, of all with a norm of all together, or of all with a norm each.
Threat = Literal["node", "frobenius", "each"]
THREATS: tuple[Threat, ...] = ("node", "frobenius", "each")

# Relative to the trace or to lengths; more than rounding takes from a Gram matrix of 10^4 columns.
_SLACK = 2.0**-36


@dataclass(frozen=True)
class TokenForms:
    """Vectors of all tokens: a centre each; of those that move, the columns of the first group and one more ball."""

    center: Float[Tensor, "token entry"]
    which: Int[Tensor, " moving"]
    first: Float[Tensor, "moving entry first"]
    rest: Float[Tensor, "moving entry entry"]

    @cached_property
    def loose(self) -> Float[Tensor, " token"]:
        """How far the second ball reaches."""
        return self._all(largest_singular_value(self.rest))

    @cached_property
    def reach(self) -> Float[Tensor, " token"]:
        """How far each vector is from its centre at most."""
        return self.stretch + self.loose

    @cached_property
    def stretch(self) -> Float[Tensor, " token"]:
        """How far the first group moves each vector at most."""
        return self._all(largest_singular_value(self.first))

    @property
    def everything(self) -> bool:
        """Whether all tokens move."""
        return len(self.which) == len(self.center)

    def form(self, tokens: Tensor, noise: Noise | None = None) -> Form:
        """Some tokens as forms, side by side; of none, or of all that move."""
        center = self.center[tokens]
        noise = Noise.of(len(tokens), self.first.shape[-1], center) if noise is None else noise
        if not self.everything:
            return constant(noise, center)
        noise.tokens = tokens
        return Form(noise, center, self.first[tokens], torch.zeros_like(center)).with_ball(self.rest[tokens])

    def still(self) -> TokenForms:
        """The same tokens, of which none moves."""
        return TokenForms(self.center, self.which[:0], self.first[:0], self.rest[:0])

    def within(self, share: float) -> TokenForms:
        """The same on a ball that is smaller by a factor."""
        return TokenForms(self.center, self.which, self.first * share, self.rest)

    def with_token(self, token: int, form: Form) -> TokenForms:
        """The same with one token from elsewhere; the only one that moves, unless all do."""
        one = merged(form)
        center = self.center.clone()
        center[token] = one.center[0]
        if not self.everything:
            return TokenForms(center, torch.tensor([token]), one.first, one.rest)
        first, rest = self.first.clone(), self.rest.clone()
        first[token], rest[token] = one.first[0], one.rest[0]
        return TokenForms(center, self.which, first, rest)

    def _all(self, sizes: Tensor) -> Tensor:
        return sizes.new_zeros(len(self.center)).index_put((self.which,), sizes * (1 + ROUNDING))


def merged(form: Form) -> TokenForms:
    """Each problem as a token, all groups but the first in one ball (L10); nan where one has failed."""
    first = form.noise.groups[0].stop
    sizes, columns = [form.box], [torch.diag_embed(form.box)]
    for group in form.noise.groups[1:]:
        if group.stop > form.columns.shape[-1]:
            break
        part = form.columns[..., group.start : group.stop]
        size = part.norm(dim=(-2, -1), keepdim=True).squeeze(-1) if group.ball else part.norm(dim=-2)
        sizes.append(size)
        columns.append(part)
    lengths = torch.cat([size.expand(-1, part.shape[-1]) for size, part in zip(sizes, columns, strict=True)], -1)
    scaled = torch.cat(columns, -1) * torch.where(lengths > 0, lengths, 1.0).rsqrt()[:, None]
    gram = torch.cat(sizes, -1).sum(-1)[:, None, None] * (scaled @ scaled.mT)
    gradient = torch.nn.functional.pad(form.columns[..., :first], (0, max(first - form.columns.shape[-1], 0)))
    center = torch.where(form.noise.failed[:, None], torch.nan, form.center)
    return TokenForms(center, torch.arange(len(center)), gradient, _root(gram))


def tokens_of(parts: list[TokenForms]) -> TokenForms:
    """Tokens of which all move, one part after the other."""
    center, first, rest = (torch.cat(each) for each in zip(*((t.center, t.first, t.rest) for t in parts), strict=True))
    return TokenForms(center, torch.arange(len(center)), first, rest)


def weighted(
    weights: Float[Tensor, "query token"], images: Float[Tensor, "#query token entry column"]
) -> Float[Tensor, "query entry entry"]:
    """A ball that holds the weighted sum over tokens of images of a ball each (L10)."""
    sizes = images.norm(dim=(-2, -1))
    safe = torch.where(sizes > 0, sizes, 1.0)
    # Over queries that share the images this is one product of matrices.
    if len(images) == 1:
        second = (images[0] @ images[0].mT) / safe[0, :, None, None]
        gram = (weights @ second.flatten(1)).unflatten(1, second.shape[1:])
    else:
        scaled = images * numerics.root(weights / safe)[..., None, None]
        scaled = scaled.transpose(1, 2).flatten(2)
        gram = scaled @ scaled.mT
    return _root(gram * (weights * sizes).sum(-1)[:, None, None])


def with_first(form: Form, images: Float[Tensor, "query token entry first"], threat: Threat) -> Form:
    """The form plus what the first groups of all tokens do together.

    They are one and the same where one node moves. Else each token has its own, and they share a ball
    (``"frobenius"``) or fill one each (``"each"``). That of a query that is a token is the form's first group.
    """
    zero, tokens = torch.zeros_like(form.center), form.noise.tokens
    if threat == "node":
        return form + Form(form.noise, zero, images.sum(1), zero)
    if tokens is not None:
        queries = torch.arange(len(tokens))
        form = form + Form(form.noise, zero, images[queries, tokens], zero)
        images = images.index_put((queries, tokens), images.new_zeros(()))
    if tokens is not None and len(tokens) == 1 and threat == "frobenius" and bool(torch.isfinite(images).all()):
        others = images[0, torch.arange(images.shape[1]) != tokens]
        return _tied(form, others.transpose(0, 1).flatten(1))
    if threat == "each":
        return form.with_ball(weighted(images.new_ones(images.shape[:2]), images))
    flat = images.transpose(1, 2).flatten(2)
    return form.with_ball(_root(flat @ flat.mT))


def with_bounded(
    form: Form, bounds: Float[Tensor, "query token"], images: Float[Tensor, "#query token entry column"], threat: Threat
) -> Form:
    """The form plus the sum over tokens of unknown numbers, within bounds, times images of what moves each token."""
    # Where all tokens share a ball, their lengths do: by Cauchy-Schwarz the sum is in the root of the sum of squares.
    if threat != "frobenius":
        return form.with_ball(weighted(bounds, images))
    if len(images) == 1:
        second = images[0] @ images[0].mT
        return form.with_ball(_root((bounds.square() @ second.flatten(1)).unflatten(1, second.shape[1:])))
    scaled = (images * bounds[..., None, None]).transpose(1, 2).flatten(2)
    return form.with_ball(_root(scaled @ scaled.mT))


def _tied(form: Form, images: Float[Tensor, "entry others"]) -> Form:
    """The form plus a linear map of the other tokens' perturbations, in the ball of the first group."""
    # With orthonormal rows Q, the vector of the first group and Q times the others' perturbations is in one ball. Rows
    # are added to Q until it spans that of the map; what is left is rounding.
    noise = form.noise
    known = images[:0] if noise.frame is None else noise.frame
    # To first order a bound does not change with a span of what is read: no gradient goes through it.
    more = torch.linalg.qr(torch.cat([known, images.detach()]).mT).Q.mT[len(known) :]
    noise.frame = frame = torch.cat([known, more])
    noise.new(len(more), ball=True, tied=True)
    along = images @ frame.mT
    loss = (images - along @ frame).detach().norm(dim=-1) + _SLACK * images.norm(dim=-1)
    places = torch.cat([torch.arange(group.start, group.stop) for group in noise.groups[1:] if group.tied])
    columns = images.new_zeros(len(images), noise.size).index_copy(1, places, along * (1 + _SLACK))
    return form + Form(noise, torch.zeros_like(form.center), columns[None], loss[None])


def _root(gram: Tensor) -> Tensor:
    """A triangular L with L L^T at least a positive semidefinite matrix."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    trace = diagonal.sum(-1)[..., None, None]
    finite = torch.isfinite(trace)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    scaled = torch.where(finite & (trace > 0), gram / torch.where(trace > 0, trace, 1.0), 0.0) + _SLACK * eye
    found = torch.linalg.cholesky_ex(scaled).L * numerics.root(trace.clamp(min=0))
    # What is zero stays zero.
    return torch.where(finite, found * (diagonal > 0)[..., None], torch.inf)
