"""The registry of claims: what is measured of each, the verdict, and the report."""
