"""What attention does to its tokens: Lipschitz constants and rank collapse, in flat space."""
