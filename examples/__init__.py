"""Scripts to learn from: each answers one question in one file, and imports nothing from this folder."""
