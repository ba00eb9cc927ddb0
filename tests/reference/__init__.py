"""The papers' formulas as loops: what the library is compared with."""

from tests.reference import chromatic, convolutions, equivariant, hyperbolic, hypformer, simplicial, tokens

REFERENCES = {
    kind: function
    for part in (hyperbolic, hypformer, convolutions, equivariant, tokens, chromatic, simplicial)
    for kind, function in part.REFERENCES.items()
}

__all__ = ["REFERENCES"]
