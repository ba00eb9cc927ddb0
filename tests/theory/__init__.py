"""Claims and what they are made of: bounds that hold, counterexamples that do violate, verdicts that follow."""
