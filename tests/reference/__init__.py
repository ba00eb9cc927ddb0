"""The papers' formulas as loops: what the library is compared with."""

from tests.reference import (
    chromatic,
    convolutions,
    equivariant,
    hyperbolic,
    hypformer,
    links,
    node_encoders,
    products,
    simplicial,
    tokens,
)

_PARTS = (
    *(hyperbolic, hypformer, convolutions, links, products),
    *(equivariant, tokens, node_encoders, chromatic, simplicial),
)
REFERENCES = {kind: function for part in _PARTS for kind, function in part.REFERENCES.items()}

__all__ = ["REFERENCES"]
