"""The papers' formulas as loops: what the library is compared with."""

from tests.reference.hyperbolic import REFERENCES

__all__ = ["REFERENCES"]
