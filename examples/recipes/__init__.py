"""What each update rule brings to a small model: the same training with every recipe, at its best learning rate."""
