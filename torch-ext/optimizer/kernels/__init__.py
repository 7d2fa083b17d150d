"""Products and multi-tensor operations that the optimizer is made of."""
