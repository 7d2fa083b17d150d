"""Which learning rates suit: models of three kinds trained over a grid of both rates, and from the best ones of it."""
