"""Data, training loops and pictures around the library: one script for one question."""
