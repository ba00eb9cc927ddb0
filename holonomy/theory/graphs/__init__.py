"""Curvature and topology of graphs, and the molecules on which claims about them are judged."""
