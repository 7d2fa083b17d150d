"""Update rules: pure functions over lists of local tensors."""
