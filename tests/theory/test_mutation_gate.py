"""The mutation gate: a wrong constant in a bound, each term by itself, is noticed by the bound's claim.

A mutant replaces a piece of a function's text. Its claim is measured on the sharpest inputs that it names, and on few
random ones where it names none, and must come out violated, or above the sharpest ratio that is known.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from holonomy.ops.softmax_attention import SIMILARITIES
from holonomy.theory import CLAIMS, Claim, Draws, Verdict, judge
from holonomy.theory.affine import cap, points
from holonomy.theory.affine.arithmetic import backward, ellipsoids, entrywise, products, quadratics, ratios, squares
from holonomy.theory.affine.arithmetic.margins import bounded
from holonomy.theory.affine.attention import features, linear
from holonomy.theory.affine.encoders import graph, rules, tracing, whole_graph
from holonomy.theory.affine.mixtures import Mixtures
from holonomy.theory.affine.undivided import Undivided
from holonomy.theory.attention import chained_collapse, lipschitz, local, masked_collapse, rank_collapse, sizes
from holonomy.theory.certificates import composition, far_out, layers, refinements
from holonomy.theory.certificates.constants import (
    affine,
    functions,
    linear_attention,
    midpoint,
    softmax_attention,
    tangent,
)
from holonomy.theory.claims.statements import certified_lemmas, certified_nodes, collapse, printed
from holonomy.theory.claims.statements import lipschitz as claims_lipschitz
from holonomy.theory.graphs import topology

pytestmark = pytest.mark.usefixtures("without_shape_checks")

NAMED = {claim.name: claim for claim in CLAIMS}


class Mutant(NamedTuple):
    """In a function's text ``old`` stands once; ``new`` in its place is wrong."""

    claim: str
    function: Callable[..., object]
    old: str
    new: str


def less(claim: str, function: Callable[..., object], *terms: str) -> list[Mutant]:
    """Each of the terms by itself, 0.9 times as large."""
    return [Mutant(claim, function, term, f"(0.9 * ({term}))") for term in terms]


def softmax(similarity: str) -> list[Mutant]:
    """The three terms of H8 over a ball, in both metrics, and at an input."""
    ball, here = softmax_attention.softmax_stretch, softmax_attention.local_softmax_stretch
    terms = ("h / 2 * query", "times(h, by_key)", "math.sqrt(columns)", "h * math.tanh(extent.values)")
    return [
        *less(f"hyperbolic.softmax_{similarity}", ball, *terms),
        Mutant(f"hyperbolic.softmax_{similarity}", ball, "return value +", "return 0.9 * value +"),
        *less(f"hyperbolic.softmax_at_{similarity}", here, "shares * s_value", "slope * s_key"),
        Mutant(f"hyperbolic.softmax_at_{similarity}", here, "2) * s_query", "2) * 0.9 * s_query"),
    ]


MUTANTS = [
    # Theorem RC
    *less("collapse.pair", rank_collapse.collapse_step, "(apart.amax(-1) - apart.amin(-1)).amax(-1)"),
    *less("collapse.product", rank_collapse.collapse_step, "diameter(heads.keys[0])", "torch.tanh(osc / 4)"),
    *less("collapse.weights", rank_collapse._by_size, "w_key[0] * diam * of_kappa / 4", "2 * value.prod(0)"),
    Mutant("collapse.weights", rank_collapse._by_size, "minimum(of_products", "minimum(0.9 * of_products"),
    *less("collapse.cubic", rank_collapse._by_size, "size * of_products"),
    *less("collapse.depth", rank_collapse._by_size, "torch.tanh(size)"),
    *less("collapse.chain", chained_collapse.chain, "torch.tanh((field + shift) / 4)", "j * single / near"),
    *less("collapse.chain", chained_collapse.chain, "j * torch.tanh(j * interaction / 4)"),
    *less("collapse.chain", chained_collapse.chain, "j * field * interaction / (4 * near)"),
    Mutant("collapse.chain", chained_collapse.chain, "shift = 2 * (_log", "shift = 1.8 * (_log"),
    *less("collapse.constant", chained_collapse.chain, "torch.tanh((field + shift) / 4)"),
    Mutant("collapse.softmax", collapse._softmax, "2 * torch.tanh(", "1.8 * torch.tanh("),
    # Masks
    *less("masked.theorem_3_4", masked_collapse.printed_masked_collapse, "math.sqrt(x.shape[0] / 2)"),
    Mutant("masked.theorem_3_4", masked_collapse.printed_masked_collapse, "(1 - least", "(0.9 - least"),
    *less("masked.dobrushin", masked_collapse.masked_collapse, "dobrushin(product)", "spectral(value)"),
    # Lipschitz constants of attention
    *less("lipschitz.plus", lipschitz.plus_bound, "w_key[0] * key[1:].prod(0)", "columns * w_value * others(value)"),
    *less("lipschitz.plus", lipschitz.plus_bound, "columns * w_key[1:] * others(key)[1:]"),
    *less("lipschitz.plus", lipschitz.plus_bound, "layer.scale * value.prod(0) * (of_query + of_keys)"),
    *less("lipschitz.plus", sizes.through_heads, "spectral(layer.out) * whole", "(each * heads).sum()"),
    Mutant("lipschitz.plus", lipschitz.plus_bound, "bound + 1 if", "bound + 0.9 if"),
    *less("lipschitz.plus_masked", lipschitz._column_sums, "weight.sum(0).amax(0)"),
    *less("lipschitz.theorem_3_7", lipschitz.printed_lipschitz, "order * value**order", "channels * order**2"),
    Mutant("lipschitz.theorem_3_7", lipschitz.printed_lipschitz, "inner = 1 +", "inner = 0.9 +"),
    *less("lipschitz.castin", lipschitz.castin_bound, "math.sqrt(3)", "4 * tokens"),
    Mutant("lipschitz.castin", lipschitz.castin_bound, "tokens + 1)", "tokens + 0.9)"),
    Mutant("lipschitz.castin", lipschitz.castin_bound, "+ tokens", "+ 0.9 * tokens"),
    *less("lipschitz.lemma_c2_corrected", claims_lipschitz._compare_c2, "(order + 1) / math.sqrt(channels)"),
    *less("lipschitz.local", local.local_lipschitz, "read.scale * spectral(read.keys[0]) * spread"),
    *less("lipschitz.local", local.local_lipschitz, "spectral(read.values[m]) * _value_norm(heads, m)"),
    *less("lipschitz.local", local._key_norm, "factor.amax(-1) ** 2 * variance"),
    Mutant("lipschitz.local", local._key_norm, "by_norm = spectral", "by_norm = 0.9 * spectral"),
    Mutant("lipschitz.plus_sharp", claims_lipschitz._sandwich, "2.65 * best", "0.9 * 2.65 * best"),
    Mutant("lipschitz.plus_sharp_orders", claims_lipschitz._orders, "4.25 * found", "0.9 * 4.25 * found"),
    # Hyperbolic layers: H1 to H7, H11, H13
    *less(
        "hyperbolic.refinement",
        affine.affine_stretch,
        "_dual(square, math.sinh(radius) ** 2 * square, moved)",
    ),
    *less("hyperbolic.refinement", affine.affine_stretch, "linear_stretch(norm, radius)"),
    *less("hyperbolic.bias", affine.affine_stretch, "_top(square + moved)[0]"),
    *less("hyperbolic.transformation", affine.transformation_stretch, "_golden(at, -12.0, 12.0)"),
    Mutant("hyperbolic.classifier", layers._read, "Step(constant", "Step(0.9 * constant"),
    *less("hyperbolic.dropout", refinements._refine, "1 / (1 - rate)"),
    *less("hyperbolic.about", affine.ball_stretch, "math.atanh(stretch) + radius"),
    Mutant("hyperbolic.about", affine.ball_stretch, "left - radius)", "left - 0.9 * radius)"),
    *less("hyperbolic.about", affine._follow_angle, "math.hypot(s - c, bias * c)", "bias * c"),
    *less("hyperbolic.activation", functions.entrywise, "2 * density", "_supremum(_silu_gap)"),
    Mutant("hyperbolic.activation", functions.entrywise, "((1.0, 1.0),)", "((1.0, 0.9),)"),
    Mutant("hyperbolic.activation", functions.entrywise, "((1.0, math.log(2)),)", "((1.0, 0.62),)"),
    *less("hyperbolic.activation", functions.entrywise_stretch, "scale * gap"),
    *less("hyperbolic.activation", functions.entrywise_stretch, "math.cosh(min(radius, 300.0))"),
    *less("hyperbolic.layer_norm", functions.layer_norm_stretch, "affine / math.sqrt(variance + eps)"),
    *less("hyperbolic.layer_norm", functions.layer_norm_stretch, "torch.diag(weight)"),
    *less("hyperbolic.weights", midpoint.weights_bound, "oscillation / 4", "math.tanh(diameter / 2)"),
    Mutant("hyperbolic.residual", midpoint.residual_stretch, "max(1 +", "max(0.9 +"),
    Mutant("hyperbolic.residual", midpoint.residual_stretch, "(0.5, share)", "(0.45, share)"),
    Mutant("hyperbolic.residual", midpoint.residual_stretch, "(0.5, share)", "(0.5, 0.9 * share)"),
    *less("hyperbolic.ends", midpoint.concatenation_stretch, "math.cosh(radius)"),
    # Linear maps of the tangent space: H14
    *less("linear_maps.tangent", tangent._growth, "math.sinh(above)"),
    Mutant("linear_maps.tangent", tangent.tangent_stretch, "turning = norm if", "turning = 0.9 * norm if"),
    *less("linear_maps.tangent", tangent.tangent_stretch, "shift_stretch(shift, far)"),
    *less("linear_maps.tangent", tangent._on_shell, "exponential_stretch(r) * min(1.0, shift / r)"),
    Mutant("linear_maps.tangent", tangent._on_shell, "return min(far", "return min(0.9 * far"),
    # Attention: H8, H9, H10
    *(mutant for similarity in SIMILARITIES for mutant in softmax(similarity)),
    *less("hyperbolic.collapse", softmax_attention.hyperbolic_collapse_bound, "2 * times(times(scale, queries), keys)"),
    *less("hyperbolic.linear_eps", linear_attention.linear_stretch_with_eps, "r_key * e_query", "r_query * e_key"),
    *less("hyperbolic.linear_eps", linear_attention.linear_stretch_with_eps, "math.sqrt(tokens)"),
    *less("hyperbolic.linear_cone", linear_attention.linear_stretch_in_cone, "r_key / (cone.opening * cone.key)"),
    Mutant("hyperbolic.linear_cone", linear_attention.linear_stretch_in_cone, "min(tokens", "min(0.9 * tokens"),
    *less("hyperbolic.linear_cone", linear_attention.linear_stretch_in_cone, "e_query / (cone.opening * cone.query)"),
    *less("hyperbolic.linear_cone", linear_attention.linear_stretch_in_cone, "e_key / (cone.opening * cone.key)"),
    *less("hyperbolic.linear_at", linear_attention.local_linear, "weights * s_value[:, None]"),
    Mutant("hyperbolic.linear_at", linear_attention.local_linear, "total * s_key", "total * 0.9 * s_key"),
    Mutant("hyperbolic.linear_at", linear_attention.local_linear, "2) * s_query", "2) * 0.9 * s_query"),
    # H12, products of constants
    *less("hyperbolic.model", composition.Tape._multiply, "times(self.constant, constant)"),
    *less("hyperbolic.model_at", composition.Tape._multiply, "times(self.constant, constant)"),
    *less("hyperbolic.model_about", composition.Tape._multiply, "times(self.constant, constant)"),
    # Certified nodes
    Mutant("certified.sound", squares.quadratic_of, "form.center, gradient", "form.center, 0.9 * gradient"),
    Mutant("certified.sound", Undivided.of, "(rows) * unit", "(rows) * (1.1 * unit)"),
    Mutant("certified.sound", Undivided.margins, "start + change", "start + 0.9 * change"),
    Mutant(
        "certified.stretch", ratios.lines_of_stretch, "stretch(at) - slopes * at", "stretch(at) - 0.9 * slopes * at"
    ),
    *less("certified.stretch", ratios.lines_of_stretch, "slope * lower"),
    *less("certified.cap", cap.farthest, "(k * radius).asinh()"),
    *less("certified.cap", cap.least_products, "(k * reach).asinh()", "root_size * turned.norm(dim=-1)"),
    Mutant("certified.quotients", products.quotient, "low), difference)", "low), difference * 0.9)"),
    *less("certified.points", points.exponential, "2 * along[:, None]"),
    Mutant("certified.points", points.midpoint, "(1 + weight) / k", "0.9 * (1 + weight) / k"),
    Mutant("certified.attention", features.features, "scale(size, ", "scale(size * 0.9, "),
    Mutant("certified.attention", linear._average, "scale(share, change)", "scale(share, change * 0.9)"),
    *less("certified.graph", graph._convolve, "layer.weight @ _mixed(step, columns)"),
    *less("certified.ellipsoids", ellipsoids.weighted, "(weights * sizes).sum(-1)"),
    *less("certified.ellipsoids", ellipsoids.with_bounded, "bounds.square()"),
    *less("certified.graph_together", whole_graph._before, "weight[edge][:, None, None]"),
    *less("certified.quadratics", quadratics.least, "(turned * point).sum(-1)"),
    Mutant("certified.parabolas", backward.above, "torch.maximum(s * s", "0.9 * torch.maximum(s * s"),
    *less("certified.parabolas", backward.below, "q * x * x"),
    *less("certified.squares", quadratics.between, "(high - low) / 2"),
    *less("certified.squares", squares.products, "one[..., i] * other[..., j] + one[..., j] * other[..., i]"),
    *less("certified.bent", entrywise.parabola, "(above - below) / 2", "2 * bend * reached * rest"),
    *less("certified.bent", entrywise.parabola, "bend * rest.square() / 2"),
    *less("certified.backward", graph.Convolved._backwards, "asked[:, 0] @ last.basis"),
    *less("certified.sharpened", backward.Switch.within, "((high - low) / 2).clamp(min=0)"),
    Mutant("certified.sharpened", backward.Switch.within, "self.center - self.rest", "self.center - 0.9 * self.rest"),
    Mutant("certified.sharpened", graph.Convolved._sharpened, "within(rest.view", "within(0.9 * rest.view"),
    Mutant("certified.sharpened", graph.Convolved._sharpened, ", value.view", ", 0.9 * value.view"),
    *less("certified.backward", graph.Propagated.below, "asked[:, 0] @ columns"),
    Mutant("certified.traced", rules._rectified, "torch.stack([half, 2", "torch.stack([0.9 * half, 2"),
    Mutant("certified.traced", tracing.rowwise, "for part in by)).abs()", "for part in by)).abs() * 0.9"),
    Mutant("certified.mixed", Mixtures.margins, "found.amax(0)", "found.amin(0)"),
    # Graphs
    Mutant("topology.normalised", topology.spectral_diameter_bound, "96 * math", "0.9 * 96 * math"),
]


STATEMENTS = [
    # Printed statements, and what is wrong in their place.
    *less("collapse.lemma_a3", printed._entrywise, "1 + 2 * oscillation"),
    Mutant("collapse.lemma_a3", printed._entrywise, "1 - oscillation", "1 - 0.9 * oscillation"),
    *less("lipschitz.lemma_c1", printed._compare_c1, "order * value**order"),
    Mutant("lipschitz.not_global", printed._not_global, "(2 * radius", "(2.2 * radius"),
    Mutant("lipschitz.vanishing", printed._sharpest_vanishing, "1.001 * order", "0.9 * order"),
    Mutant("lipschitz.tokens", printed._tokens, "(1.5, 0.5)", "(1.5, 0.45)"),
    Mutant("lipschitz.tokens", printed._tokens, "(1.5, 0.5)", "(1.4, 0.5)"),
    Mutant("hot.proposition_1", printed._columns, "weight.shape[0])", "weight.shape[0] - 1)"),
    Mutant("hot.proposition_2", printed._by_diagonal, "x.diagonal(dim1=0, dim2=1).movedim(-1, 0)", "x.sum(1)"),
    Mutant("hot.opposite", printed._opposite, "moved[8]", "moved[2]"),
    Mutant("tokens.lemma_2", printed._separation, "if any(", "if all("),
    Mutant("tokens.lemma_3", printed._split, "[a == b for a in first for b in second]", "[]"),
    Mutant("tokens.scoring", printed._scoring, "else -1", "else 0"),
    Mutant("hyperbolic.linear_time", printed._hypformer, "HypLinearAttention", "HypSoftmaxAttention"),
    Mutant("certified.first_order", certified_nodes._first_order, "abs(more) / 3", "abs(more) / 5"),
    *less("certified.first_order_together", bounded, "form.spread()"),
    *less("certified.first_order_together", ellipsoids._tied, "along * (1 + _SLACK)"),
    Mutant("certified.secant", certified_nodes._secant, "item() / 2", "item() / 2.2"),
    Mutant("certified.products", certified_nodes._products, "item() / 2", "item() / 2.2"),
    Mutant("certified.lengths", certified_nodes._lengths, "a * y @ change / start", "0.9 * a * y @ change / start"),
    *less("certified.features", features.largest_angle, "found.amax(-1)"),
    *less("certified.softmax", certified_lemmas._softmax, "weights.sum().item()", "mean.square()"),
    *less("certified.averages", certified_lemmas._averages, "(dk @ dq) @ offset", "(after - before) @ dv"),
    Mutant("certified.lorentz_norms", certified_nodes._lorentz_norms, "tangent / norm)", "0.9 * tangent / norm)"),
    *less("linear_maps.steps", far_out.transformation_steps, "swept(end) - swept(start)"),
    *less("linear_maps.steps_on_an_axis", far_out.axis_steps, "end + math.hypot(end, q)"),
    Mutant("linear_maps.no_escape", far_out.least_chart_stretch, "math.sinh(reach)", "1.1 * math.sinh(reach)"),
    *less("linear_maps.not_lipschitz", far_out.hyperplane_stretch, "math.cosh(size * a)"),
    Mutant("colouring.csa", printed._csa, '"cgt"', '"gcn"'),
]


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Let every caller of the function run the mutant: its code is replaced, not its name."""
    function = inspect.unwrap(mutant.function)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(mutant.old) == 1, f"{mutant.old!r} stands {text.count(mutant.old)} times in {function.__name__}"
    (tree,) = ast.parse(text.replace(mutant.old, mutant.new)).body
    tree.decorator_list = []
    names = dict(function.__globals__)
    exec(compile(ast.Module([tree], []), inspect.getsourcefile(function), "exec", annotations.compiler_flag), names)
    before, function.__code__ = function.__code__, names[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before


def verdict(claim: Claim) -> Verdict:
    """What the sharpest inputs say, or a few random ones."""
    draws = Draws(0, budget=0.05)
    trials = claim.trials(draws) if claim.sharpest is None else claim.sharpest(draws)
    return judge(claim.name, claim.source, trials, kind=claim.kind)


@pytest.mark.parametrize("mutant", MUTANTS + STATEMENTS, ids=lambda mutant: f"{mutant.claim}: {mutant.new}")
def test_a_wrong_constant_is_noticed(mutant):
    with planted(mutant):
        found = verdict(NAMED[mutant.claim])
    assert found.holds is not True or found.sharper


@pytest.mark.parametrize("name", sorted({mutant.claim for mutant in MUTANTS}))
def test_a_right_constant_is_not(name):
    """And the inputs come close to the sharpest ratio that is known."""
    found = verdict(NAMED[name])
    assert found.holds is True
    assert not found.sharper
    assert found.kind == "upper" or found.sees > 0.99


@pytest.mark.parametrize("claim", printed.CLAIMS, ids=lambda claim: claim.name)
def test_printed_statements_have_the_expected_verdict(claim, dtype):
    found, _ = claim.measure(Draws(0, dtype=dtype, budget=0.1))
    assert found.holds is claim.expected
    assert not found.sharper
