"""The house itself: its tools bite, its sources keep the rules, its documentation is whole."""
