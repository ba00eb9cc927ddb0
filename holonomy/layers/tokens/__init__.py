"""Graphs and hypergraphs as tokens: identifiers, tokenizers and the encoder layer on tokens (TokenGT)."""
