"""Every public class of layers, models and manifolds, at every value of every option: what the laws run over.

A :class:`Case` knows how to make a module and inputs for it in a :class:`Setting` (sizes, curvatures, dtype, device),
where the output lies, and the loop-written reference. ``test_registry`` fails when a public class is missing here,
or has no reference.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from holonomy import layers, manifolds, models
from tests.registry import (
    chromatic,
    convolutions,
    equivariant,
    hyperbolic,
    node_encoders,
    products,
    sequences,
    simplicial,
    tokens,
)
from tests.registry.case import Case, Setting

__all__ = ["ATTENTIONS", "CASES", "ELSEWHERE", "Case", "Setting", "public_classes"]

_PARTS = (hyperbolic, convolutions, products, equivariant, tokens, node_encoders, chromatic, simplicial, sequences)
CASES: list[Case] = [case for part in _PARTS for case in part.CASES]

# Public classes without a case, each with where its tests are.
ELSEWHERE = {
    manifolds.Curvature: "one number, whose value and gradients are in tests/manifolds/test_lorentz.py",
    manifolds.Lorentz: "no forward: its functions are compared with 60 digits in tests/manifolds",
    manifolds.Product: "no forward: tests/manifolds/test_product.py",
    manifolds.Sphere: "no forward: tests/manifolds/test_sphere.py",
    manifolds.WrappedNormal: "no module: tests/manifolds/test_distributions.py",
}


def public_classes() -> Sequence[type[nn.Module]]:
    """Return every class that the packages publish."""
    published = [getattr(package, name) for package in (layers, models, manifolds) for name in package.__all__]
    return [item for item in published if isinstance(item, type)]


# Attention that is not among the tokens of a sequence, each with the reason.
_NOT_AMONG_TOKENS = {
    layers.ChromaticAttention: "its pairs have features, which those with a memory or a later token do not",
    layers.ChromaticEncoderLayer: "the same",
    layers.HigherOrderAttention: "it is among tuples of nodes",
    layers.HigherOrderEncoderLayer: "the same",
}

# Every other one, and the layers around one: they share an interface, of which tests/laws/test_sequences.py has laws.
ATTENTIONS: list[type[nn.Module]] = [
    kind
    for kind in public_classes()
    if kind.__name__.endswith(("Attention", "EncoderLayer", "Block")) and kind not in _NOT_AMONG_TOKENS
]
