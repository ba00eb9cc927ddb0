"""The papers' formulas as loops: what the library is compared with."""

from tests.reference import (
    chromatic,
    convolutions,
    equivariant,
    hyperbolic,
    hypformer,
    links,
    node_encoders,
    simplicial,
    tokens,
)

REFERENCES = {
    kind: function
    for part in (hyperbolic, hypformer, convolutions, links, equivariant, tokens, node_encoders, chromatic, simplicial)
    for kind, function in part.REFERENCES.items()
}

__all__ = ["REFERENCES"]
