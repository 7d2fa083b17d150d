"""A tiny transformer with experts, and how it lies on eight processes."""
