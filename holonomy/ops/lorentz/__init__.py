"""Linear maps, midpoints and norms of points on the hyperboloid, some rows at a time."""
