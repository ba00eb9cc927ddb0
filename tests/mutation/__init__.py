"""Mutation testing: one small error at a time is put into the library, and the tests of the changed line must fail.

``mutants`` says which errors there are, ``coverage_map`` which test runs which line, ``runner`` puts one in and
runs the tests. ``make mutation`` does it for a sample of 1000.
"""
