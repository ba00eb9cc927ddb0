"""What the scripts share: options, runs that survive being killed, comparisons of models, scores, plots."""
