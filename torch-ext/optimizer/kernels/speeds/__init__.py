"""How fast products are on the present machine: measured here, shipped, or predicted by a model."""
