"""Midpoints, their layer normalisation, and distances from hyperplanes, of points on the hyperboloid."""
