"""N-simplicial attention as layers: projections, routers and an encoder layer (Simplicial)."""
