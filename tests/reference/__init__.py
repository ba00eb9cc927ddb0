"""The papers' formulas as loops: what the library is compared with."""

from tests.reference import equivariant, hyperbolic, tokens

REFERENCES = hyperbolic.REFERENCES | equivariant.REFERENCES | tokens.REFERENCES

__all__ = ["REFERENCES"]
