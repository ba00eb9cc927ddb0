"""Data sets, read without pickle or drawn."""
