"""The claims, paper by paper."""
