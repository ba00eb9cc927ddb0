"""Which graphs a model can tell apart: colourings, constructions and measurements."""
