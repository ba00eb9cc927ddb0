"""Lipschitz constants, in the hyperbolic metric, of single layers: statement, proof and code."""
