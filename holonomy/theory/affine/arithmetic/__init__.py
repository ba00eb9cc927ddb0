"""Affine forms and the operations on them, each with its lemma."""
