"""The papers' formulas as loops: what the library is compared with."""

from tests.reference import chromatic, convolutions, equivariant, hyperbolic, hypformer, links, simplicial, tokens

REFERENCES = {
    kind: function
    for part in (hyperbolic, hypformer, convolutions, links, equivariant, tokens, chromatic, simplicial)
    for kind, function in part.REFERENCES.items()
}

__all__ = ["REFERENCES"]
