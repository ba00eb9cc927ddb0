"""The papers' formulas as loops: what the library is compared with."""

from tests.reference import chromatic, equivariant, hyperbolic, tokens

REFERENCES = hyperbolic.REFERENCES | equivariant.REFERENCES | tokens.REFERENCES | chromatic.REFERENCES

__all__ = ["REFERENCES"]
