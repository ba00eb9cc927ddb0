"""Attention between points of the hyperboloid: linear (Hypformer eqs. 14-19), softmax (eqs. 3-5), simplicial."""
