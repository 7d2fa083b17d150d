"""Parameters: which are matrices, which branch each one goes to, and their settings and state."""
