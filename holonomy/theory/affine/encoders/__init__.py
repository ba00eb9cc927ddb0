"""Graph encoders on a ball of features."""
