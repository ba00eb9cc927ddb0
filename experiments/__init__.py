"""The settings of the papers: comparisons, searches and tables, in runs that can be resumed."""
