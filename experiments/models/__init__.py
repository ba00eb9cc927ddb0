"""Models to compare with: flat transformers, multilayer perceptrons, message passing."""
