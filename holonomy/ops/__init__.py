"""Attention as pure functions of queries, keys, values and a mask, and what sparse features need."""
