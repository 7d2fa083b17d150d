"""Matrix products and multi-tensor operations, the building blocks of the optimizer."""
