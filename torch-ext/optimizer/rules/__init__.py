"""Update rules: pure functions on lists of local tensors."""
