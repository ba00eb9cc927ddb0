"""The basis of equivariant maps: set partitions, and the orbits of index tuples that they name."""
