"""Averages of tokens that move: enclosures hold at sampled noise; nine tenths of one is noticed on a sharp family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from holonomy.ops.linear_attention.reference import power_features
from holonomy.ops.softmax_attention import SIMILARITIES, Similarity, hyperbolic_softmax_attention
from holonomy.theory.affine.arithmetic import ellipsoids, forms
from holonomy.theory.affine.arithmetic.ellipsoids import Threat, TokenForms
from holonomy.theory.affine.arithmetic.forms import Form, Noise
from holonomy.theory.affine.arithmetic.lengths import length
from holonomy.theory.affine.attention.averages import linear_average
from holonomy.theory.affine.attention.features import features
from holonomy.theory.affine.attention.softmax import softmax_average
from tests.theory.test_affine import draw, random_forms, use, values, weakened

TOKENS, ENTRIES, FIRST, SAMPLES = 6, 3, 3, 60
CURVATURE = torch.tensor([-0.7]).double()
ROOT = CURVATURE.neg().sqrt().item()
THREATS: tuple[Threat, ...] = ("node", "frobenius", "each")


def tokens(generator: torch.Generator, size: float, entries: int, *, all_move: bool = True) -> TokenForms:
    which = torch.arange(TOKENS) if all_move else torch.tensor([2])
    center, first, rest = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((TOKENS, entries), (len(which), entries, FIRST), (len(which), entries, entries))
    )
    return TokenForms(center, which, first * size, rest * size)


def balls(samples: int, count: int, size: int, generator: torch.Generator) -> Tensor:
    """Points on spheres, one for each sample and token."""
    drawn = torch.randn(samples, count, size, generator=generator, dtype=torch.float64)
    return drawn / drawn.norm(dim=-1, keepdim=True)


def moved(found: TokenForms, first: Tensor, generator: torch.Generator) -> Tensor:
    """Vectors ``(sample, token, entry)`` that the tokens hold, ``first`` ``(sample, token, first)`` given."""
    rest = balls(len(first), len(found.which), found.rest.shape[-1], generator)
    change = torch.einsum("mef,smf->sme", found.first, first[:, found.which])
    change = change + torch.einsum("mef,smf->sme", found.rest, rest)
    return found.center.expand(len(first), -1, -1).index_add(1, found.which, change)


def firsts(threat: Threat, own: Tensor, generator: torch.Generator) -> Tensor:
    """The first groups of all tokens, where that of the query is ``own`` ``(sample, first)``."""
    if threat == "node":
        return own[:, None].expand(-1, TOKENS, -1)
    drawn = balls(len(own), TOKENS, FIRST, generator)
    if threat == "each":
        return drawn
    share = torch.rand(len(own), TOKENS, 1, generator=generator, dtype=torch.float64)
    return drawn * share / share.norm(dim=1, keepdim=True)


def lifted(space: Form) -> Form:
    radius = forms.constant(space.noise, torch.full_like(space.center[:, :1], 1 / ROOT))
    return forms.join(length(forms.join(space, radius)), space)


def above(found: TokenForms) -> TokenForms:
    """The points above space parts that move, as tokens."""
    if found.everything:
        return ellipsoids.merged(lifted(found.form(torch.arange(TOKENS))))
    still = ellipsoids.merged(lifted(found.still().form(torch.arange(TOKENS))))
    one = torch.arange(1)
    mover = TokenForms(found.center[found.which], one, found.first, found.rest).form(one)
    return still.still().with_token(2, lifted(mover))


@pytest.mark.parametrize("threat", THREATS)
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("all_move", [True, False])
def test_a_softmax_average_is_enclosed(similarity: Similarity, threat: Threat, *, all_move: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    for size in (0.01, 0.15):
        (space,) = random_forms((ENTRIES,), generator, size)
        keys, chosen = (tokens(generator, size, ENTRIES, all_move=all_move) for _ in range(2))
        noise = draw(space.noise, SAMPLES, generator)
        old = space.noise.size
        asked = values(space, noise)
        found = softmax_average(lifted(space), above(keys), above(chosen), similarity, ROOT, threat)
        assert not found.noise.failed.any()
        first = firsts(threat, noise[..., :FIRST].flatten(0, 1), generator)
        key, value = moved(keys, first, generator), moved(chosen, first, generator)
        asked = asked.flatten(0, 1)[:, None]
        truth = hyperbolic_softmax_attention(asked, key, value, curvature=CURVATURE, similarity=similarity)
        assert use(found, old, truth.unflatten(0, (SAMPLES, -1))[:, :, 0], noise, generator) <= 1


@pytest.mark.parametrize("threat", THREATS)
@pytest.mark.parametrize("midpoint", [True, False])
def test_a_linear_average_is_enclosed(threat: Threat, *, midpoint: bool) -> None:
    generator = torch.Generator().manual_seed(12)
    for size in (0.01, 0.1):
        (space,) = random_forms((ENTRIES,), generator, size)
        # The average does not see a factor of the query.
        space = replace(space, center=space.center.abs() + 0.5) * (0.01 / size)
        keys, chosen = (tokens(generator, size, ENTRIES) for _ in range(2))
        keys = replace(keys, center=keys.center.abs() + 0.5)
        noise = draw(space.noise, SAMPLES, generator)
        old, asked = space.noise.size, values(space, noise)
        found = linear_average(
            space, keys, above(chosen) if midpoint else chosen, ROOT if midpoint else None, threat
        )  # fmt: skip
        first = firsts(threat, noise[..., :FIRST].flatten(0, 1), generator)
        key, value = moved(keys, first, generator), moved(chosen, first, generator)
        weight = torch.einsum("se,ske->sk", asked.flatten(0, 1), key)
        if midpoint:
            time = (value.square().sum(-1, keepdim=True) + 1 / ROOT**2).sqrt()
            total = torch.einsum("sk,ske->se", weight, torch.cat([time, value], -1))
            norm = (total[:, :1] ** 2 - total[:, 1:].square().sum(-1, keepdim=True)).sqrt()
            truth = total[:, 1:] / (norm * ROOT)
        else:
            truth = torch.einsum("sk,ske->se", weight, value) / weight.sum(-1, keepdim=True)
        assert not found.noise.failed.all()
        assert use(found, old, truth.unflatten(0, (SAMPLES, -1)), noise, generator) <= 1


def test_features_of_entries_that_stay_positive_are_held_closer_than_by_their_slope() -> None:
    """One entry is far from zero, so that the length is, and the direction is followed; one stays negative."""
    generator = torch.Generator().manual_seed(230)
    center = torch.randn(1, 8, generator=generator).double()
    center[0, 0] = 2 + torch.rand((), generator=generator)
    columns = 0.5 * torch.randn(1, 8, 3, generator=generator).double()
    columns[:, 0] *= 0.3
    form = Form(Noise.of(1, 3, center), center, columns, torch.zeros_like(center))
    found = features(form, 2.0)
    noise = draw(form.noise, 400, generator)[..., :3]
    truth = power_features(values(form, noise), 2.0)
    assert use(found, 3, truth, noise, generator) <= 1
    live = (center + form.spread() > 0).double()
    assert live.sum().item() < 8
    assert found.reach().item() < 0.9 * 2 * live.sum().item() ** 0.25 * (form * live).reach().item()


def test_a_query_that_no_key_meets_has_a_zero_average() -> None:
    noise = Noise.of(2, 1, torch.zeros(1).double())
    center = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()
    query = Form(noise, center, center[..., None] / 10, torch.zeros_like(center))
    keys = TokenForms(
        torch.tensor([[2.0, 0.0]]).double(),
        torch.arange(1),
        torch.tensor([[[0.1], [0.0]]]).double(),
        torch.zeros(1, 2, 2).double(),
    )
    chosen = replace(keys, center=torch.tensor([[3.0, 4.0]]).double())
    found = linear_average(query, keys, chosen, None, "node")
    torch.testing.assert_close(found.center, torch.tensor([[3.0, 4.0], [0.0, 0.0]]).double(), rtol=0, atol=0.05)
    assert not found.center[1].any()
    assert not found.noise.failed.any()
    assert found.reach()[1] == 0


def test_a_token_that_has_failed_is_not_taken_for_one_without_weight() -> None:
    """Its centre is nan, and the average was zero with a bound: unsound after blocks that do not normalise rows."""
    noise = Noise.of(2, 1, torch.zeros(1).double())
    query = Form(noise, torch.ones(2, 2).double(), torch.zeros(2, 2, 1).double(), torch.zeros(2, 2).double())
    still = torch.zeros(2, 2, 1).double(), torch.zeros(2, 2, 2).double()
    chosen = TokenForms(torch.ones(2, 2).double(), torch.arange(2), *still)
    keys = replace(chosen, center=torch.tensor([[1.0, 1.0], [torch.nan, torch.nan]]).double())
    linear_average(query, keys, chosen, None, "each")
    assert noise.failed.all()


@pytest.mark.parametrize("ball", [True, False])
def test_merged_noise_holds_all_and_nine_tenths_of_it_does_not(*, ball: bool) -> None:
    noise = Noise.of(1, 1, torch.zeros(1).double())
    zero = torch.zeros(1, 2).double()
    form = Form(noise, zero, torch.zeros(1, 2, 1).double(), zero)
    matrix = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]]).double()
    form = form.with_ball(matrix) if ball else form.apart(zero, torch.tensor([[3.0, 1.0]]).double())
    found = ellipsoids.merged(form)
    directions = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    directions = torch.cat([directions, torch.eye(2).double(), torch.tensor([[1.0, 1.0], [3.0, 1.0]]).double()])
    need = form.linear(directions).spread()[0]
    got = (directions @ found.rest[0]).norm(dim=-1)
    assert (need <= got).all()
    assert (need > 0.9 * got).any()


@pytest.mark.parametrize("threat", THREATS)
def test_what_tokens_do_together_is_held_and_nine_tenths_is_not(threat: Threat) -> None:
    generator = torch.Generator().manual_seed(2)
    images = (
        torch.randn(1, 5, 2, 1, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.3]).double()[:, None]
    )
    noise = Noise.of(1, 1, torch.zeros(1).double())
    base = forms.constant(noise, torch.zeros(1, 2).double())
    found = ellipsoids.with_first(base, images, threat)
    directions = torch.randn(300, 2, generator=generator, dtype=torch.float64)
    each = (directions @ images[0, :, :, 0].T).T
    need = {"node": each.sum(0).abs(), "frobenius": each.norm(dim=0), "each": each.abs().sum(0)}[threat]
    got = found.linear(directions).spread()[0]
    assert (need <= got).all()
    assert (need > 0.9 * got).any()


@pytest.mark.parametrize(("count", "entries"), [(1, 2), (3, 2), (3, 8)])
def test_maps_of_all_tokens_share_one_ball(count: int, entries: int) -> None:
    """One after the other, they are their sum: nothing is lost, whatever they have in common, and however many."""
    generator = torch.Generator().manual_seed(count + entries)
    own = 0
    noise = Noise.of(1, 2, torch.zeros(1).double())
    noise.tokens = torch.tensor([own])
    drawn = torch.randn(4, count, entries, 2, generator=generator, dtype=torch.float64)
    maps = [drawn[0], drawn[1], 2 * drawn[0] - drawn[1], 0 * drawn[2], drawn[3]]
    zero = torch.zeros(1, entries).double()
    found = Form(noise, zero, torch.randn(1, entries, 2, generator=generator, dtype=torch.float64), zero)
    whole = torch.stack(maps).sum(0)
    whole[own] += found.columns[0]
    for images in maps:
        found = ellipsoids.with_first(found, images[None], "frobenius")
    directions = torch.randn(50, entries, generator=generator, dtype=torch.float64)
    need = torch.einsum("de,jef->djf", directions, whole).flatten(1).norm(dim=-1)
    got = found.linear(directions).spread()[0]
    assert (need <= got).all()
    assert (got <= need * (1 + 1e-9)).all()
    size = torch.linalg.matrix_norm(whole.transpose(0, 1).flatten(1), 2)
    assert size <= found.reach().item() <= size * (1 + 1e-6)


@pytest.mark.parametrize("threat", ["frobenius", "each"])
def test_what_a_token_does_to_itself_is_added_with_sign(threat: Threat) -> None:
    """Of two queries side by side, each moves by a column of its own, which its image takes back."""
    noise = Noise.of(2, 1, torch.zeros(1).double())
    noise.tokens = torch.tensor([2, 0])
    zero = torch.zeros(2, 1).double()
    form = Form(noise, zero, torch.tensor([[[1.0]], [[4.0]]]).double(), zero)
    images = torch.tensor([[0.5, 0.25, -1.0], [-4.0, 0.0, 2.0]]).double()[:, :, None, None]
    found = ellipsoids.with_first(form, images, threat).spread()
    others = {"frobenius": [0.3125**0.5, 2.0], "each": [0.75, 2.0]}[threat]
    torch.testing.assert_close(found, torch.tensor(others).double()[:, None], rtol=1e-4, atol=0)


# One token far from all others: what moves it alone shows, to first order in its small weight.
FAR = 12.0


def far_token(part: str, size: float) -> tuple[Form, TokenForms, TokenForms]:
    """A query between a near token and a far one; the named part moves by ``size``."""
    noise = Noise.of(1, 1, torch.zeros(1).double())
    zero = torch.zeros(1, 2).double()
    along = torch.tensor([[[1.0], [0.0]]]).double() * size
    query = Form(noise, zero, along if part == "query" else torch.zeros_like(along), zero)
    if part == "query, by a later group":
        query = query.with_ball(along)
    center = torch.tensor([[0.0, 0.0], [FAR, 0.0]]).double()
    first, rest = torch.zeros(2, 2, 1).double(), torch.zeros(2, 2, 2).double()
    moving = rest.clone()
    moving[1, 0, 0] = size
    keys = TokenForms(center, torch.arange(2), first, moving if part == "key" else rest)
    chosen = center.flip(1)
    moving = rest.clone()
    moving[1, 1, 1] = size
    return query, keys, TokenForms(chosen, torch.arange(2), first, moving if part == "value" else rest)


@pytest.mark.parametrize(
    ("part", "size"), [("query", 0.05), ("query, by a later group", 0.05), ("key", 1e-3), ("value", 1e-3)]
)
def test_nine_tenths_of_a_softmax_average_is_noticed(part: str, size: float) -> None:
    query, keys, chosen = far_token(part, size)
    old = query.noise.size
    grid = torch.linspace(-1, 1, 101).double()[:, None, None].expand(-1, 1, old)
    asked, key, value = (
        values(query, grid) if "query" in part else query.center.expand(101, 1, 2),
        keys.center,
        chosen.center,
    )
    shift = grid[..., :1] * size * torch.tensor([[0.0], [1.0]]).double()
    key = key + shift * torch.tensor([1.0, 0.0]).double() if part == "key" else key.expand(101, 2, 2)
    value = value + shift * torch.tensor([0.0, 1.0]).double() if part == "value" else value.expand(101, 2, 2)
    truth = hyperbolic_softmax_attention(asked, key, value, curvature=CURVATURE, similarity="lorentz_squared")
    found = softmax_average(lifted(query), above_two(keys), above_two(chosen), "lorentz_squared", ROOT, "node")
    generator = torch.Generator().manual_seed(0)
    assert use(found, old, truth, grid, generator) <= 1
    assert use(weakened(found, old), old, truth, grid, generator) > 1


def above_two(found: TokenForms) -> TokenForms:
    return ellipsoids.merged(lifted(found.form(torch.arange(2))))


@pytest.mark.parametrize("part", ["key", "value", "query and value"])
def test_nine_tenths_of_a_linear_average_is_noticed(part: str) -> None:
    noise = Noise.of(1, 1, torch.zeros(1).double())
    center = torch.tensor([[1.0, 1.0]]).double()
    along = torch.tensor([[[0.0], [0.5 if "query" in part else 0.0]]]).double()
    query = Form(noise, center, along, torch.zeros_like(center))
    # The second token has a small weight, through the second entry of the query alone.
    small, rest = 2.0**-10, torch.zeros(2, 2, 2).double()
    moving = rest.clone()
    moving[1, 1, 1] = small / 2
    which, still = torch.arange(2), torch.zeros(2, 2, 1).double()
    two = torch.tensor([[[1.0, 0.0], [0.0, small]], [[0.0, 0.0], [0.0, 1.0]]]).double()
    keys = TokenForms(two[0], which, still, moving if part == "key" else rest)
    chosen = TokenForms(two[1], which, still, moving if "value" in part else rest)
    grid = torch.linspace(-1, 1, 41).double()
    first, second = torch.meshgrid(grid, grid, indexing="ij")
    weight = (1 + first * along[0, 1, 0]) * (small + second * (small / 2 if part == "key" else 0.0))
    truth = weight / (1 + weight) * (1 + second * (small / 2 if "value" in part else 0.0))
    truth = torch.stack([torch.zeros_like(truth), truth], -1).flatten(0, 1)[:, None]
    found = linear_average(query, keys, chosen, None, "node")
    given = first.reshape(-1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    assert use(found, 1, truth, given, generator) <= 1
    assert use(weakened(found, 1), 1, truth, given, generator) > 1


def test_points_that_the_lorentzian_distance_holds_nearer_are_a_failure() -> None:
    query, keys, chosen = far_token("value", 0.1)
    far = replace(keys, center=keys.center * 1e8)
    found = softmax_average(lifted(query), above_two(far), above_two(chosen), "lorentz_squared", ROOT, "node")
    assert found.noise.failed.all()
    query, keys, chosen = far_token("query", 1e8)
    found = softmax_average(lifted(query), above_two(keys), above_two(chosen), "lorentz_squared", ROOT, "node")
    assert found.noise.failed.all()


def test_a_token_reaches_as_far_as_both_of_its_balls() -> None:
    """Where these are parallel: three and four are seven."""
    column = torch.tensor([[[0.6], [0.8]]]).double()
    rest = torch.cat([4 * column, torch.zeros_like(column)], -1)
    found = TokenForms(torch.zeros(3, 2).double(), torch.tensor([1]), 3 * column, rest)
    torch.testing.assert_close(found.reach, torch.tensor([0.0, 7.0, 0.0]).double())
    torch.testing.assert_close(found.loose, torch.tensor([0.0, 4.0, 0.0]).double())
