"""Proof and timing of what a size is multiplied by, on the device that is here; never inside a step."""
