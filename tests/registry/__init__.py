"""The registered cases, one file for each part of the library."""
