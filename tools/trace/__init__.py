"""What a step of the optimizer runs through, file by file."""
