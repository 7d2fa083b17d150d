"""What is a matrix, which branch a parameter goes to, which settings and state it has."""
