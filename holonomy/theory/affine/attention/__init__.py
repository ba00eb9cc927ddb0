"""Enclosures of the two attentions."""
