"""Layers between hyperboloids: linear maps, refinements, midpoints, attention, classifiers."""
