"""How far a change of the input can carry: constants of hyperbolic layers and of whole models."""
