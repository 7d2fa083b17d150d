"""Made once, frozen, without a tensor: what is worked on together, by which rank, and what is sent to whom."""
