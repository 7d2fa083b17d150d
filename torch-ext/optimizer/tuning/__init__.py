"""Proof and timing of kernels for the sizes that are used, on the present device; never inside a step."""
