"""The papers' settings: data, runs that are killed and resumed, and every script at toy size."""
